"""The current state of another library's modules: tensors, hooks, and whether results are deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as globally
from torch.nn.utils.weight_norm import WeightNorm

_Dropout = nn.modules.dropout._DropoutNd
_BatchNorm = nn.modules.batchnorm._BatchNorm
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


class State:
    """All tensors of some modules, and whether their weights tell what they compute.

    hooked: hooks or a replaced method may change what the layers compute.
    noisy: batch norm or dropout is in train mode, or batch norm keeps no statistics.
    bare: the layers' attributes are the weights. Old-style weight norm sets them only when a layer is called.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self.hooked = any(getattr(globally, name) for name in _GLOBAL)
        self.noisy, self.bare = False, True
        for m in (m for part in parts for m in part.modules()):
            self.tensors += [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
            self.hooked |= "forward" in m.__dict__ or any(getattr(m, name) for name in _HOOKS)
            if isinstance(m, _BatchNorm):
                self.noisy |= m.training or m.running_mean is None
            elif isinstance(m, _Dropout):
                self.noisy |= m.training and m.p > 0
            if m._forward_pre_hooks:
                self.bare = False
                self.hooked |= not all(isinstance(h, WeightNorm) for h in m._forward_pre_hooks.values())

    def obstacle(self, device: torch.device) -> str | None:
        """Why only the original is right, now and in this mode of torch."""
        if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
            return "forward-mode derivatives or a torch.func transform"
        if torch.is_autocast_enabled(device.type):
            return "autocast"
        if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
            return "it is traced or compiled"
        if self.hooked:
            return "hooks or a replaced forward method"
        return "train mode with dropout or batch norm" if self.noisy else None


class Snapshot:
    """The tensors, layers and modes that a module has now, for a later evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self._noisy = [m for m in module.modules() if isinstance(m, _BatchNorm | _Dropout)]
        stores = [store for m in module.modules() for store in (m._parameters, m._buffers, m._modules)]
        self._stores: list[tuple[dict[str, Any], dict[str, Any]]] = [(store, dict(store)) for store in stores]
        self._marks = self._look()

    def _look(self) -> list[tuple[int, int]]:
        tensors = [t for _, then in self._stores for t in then.values() if isinstance(t, Tensor)]
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Put the tensors and layers of the snapshot back inside a with statement."""
        if self._look() != self._marks:
            advice = "call backward before the optimiser's step, or sample again"
            raise RuntimeError(f"weights were overwritten between sampling and the backward pass: {advice}")
        now = [dict(store) for store, _ in self._stores]
        training = [m for m in self._noisy if m.training]  # sampling took place in eval mode
        try:
            for store, then in self._stores:
                store.update(then)
            for m in training:
                m.training = False
            yield
        finally:
            for (store, _), values in zip(self._stores, now, strict=True):
                store.clear()
                store.update(values)
            for m in training:
                m.training = True
