"""What an adapter says about a transform, and how the modules of another library are read and copied."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as globally
from torch.nn.utils.weight_norm import WeightNorm

from jacobiflow.core.bijectors import Bijector

if TYPE_CHECKING:
    from jacobiflow.adapters.masked import ForeignNetwork

Map = Callable[[Tensor], tuple[Tensor, Tensor]]  # [n, w] -> [n, w] and the log-determinant [n]
Theta = Callable[[Tensor], Tensor]  # x [n, w] -> theta [n, w, P]
Twin = Callable[[Theta, int], tuple[Map, Map]]  # forward and inverse of the first w features, given theta
NewTensor = Callable[[nn.Module, str, Tensor], Tensor]
_Dropout = nn.modules.dropout._DropoutNd
_BatchNorm = nn.modules.batchnorm._BatchNorm
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


class Declined(Exception):
    """A transform looks familiar but cannot be accelerated, or not now. The text is the reason."""


class NothingToGain(Declined):
    """The inverse of a transform is fast as it is."""


@dataclass(frozen=True)
class TransformSpec:
    """A transform z = f(x; theta(x)). `maps` and `networks` are candidates: `recognise.verify` keeps one of each."""

    module: nn.Module  # holds all weights
    passes: int  # calls of the whole network that the library's own inverse takes
    context: int  # its features C; 0: it takes none
    theta: Callable[[Tensor, Tensor | None], Tensor]  # x [n, T], context [n, C] -> [n, T, P]
    maps: tuple[Bijector, ...]  # the fastest first, as `networks`
    networks: tuple[ForeignNetwork, ...]
    twin: Twin
    options: object = None  # what else the map depends on; comparable
    resolution: float = 0.0  # absolute error of the elementwise inverse, if that is an approximation

    @property
    def bijector(self) -> Bijector:
        return self.maps[0]

    @property
    def network(self) -> ForeignNetwork:
        return self.networks[0]

    @cached_property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the weights."""
        return next(self.module.parameters(), torch.zeros(()))


class State:
    """All tensors of some modules, and whether their weights tell what they compute."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self.hooked = any(getattr(globally, name) for name in _GLOBAL)  # or a method of a layer is replaced
        self.noisy = False  # batch norm or dropout is in train mode, or batch norm keeps no statistics
        self.bare = True  # attributes are the weights: old-style weight norm sets them only when a layer is called
        modules = list(parts)
        while modules:  # `Module.modules` takes several times as long
            m = modules.pop()
            self.tensors += [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
            modules += [child for child in m._modules.values() if child is not None]
            self.hooked |= "forward" in m.__dict__ or any((m._forward_hooks, m._backward_hooks, m._backward_pre_hooks))
            self.noisy |= isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)
            self.noisy |= isinstance(m, _Dropout) and m.training and m.p > 0
            if m._forward_pre_hooks:
                self.bare = False
                self.hooked |= not all(isinstance(h, WeightNorm) for h in m._forward_pre_hooks.values())

    def check(self, device: torch.device) -> None:
        """Raise Declined if only the original is right, now and in this mode of torch."""
        functional = forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
        traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
        for found, reason in (
            (functional, "forward-mode derivatives or a torch.func transform"),
            (torch.is_autocast_enabled(device.type), "autocast"),
            (traced, "it is traced or compiled"),
            (self.hooked, "hooks or a replaced forward method"),
            (self.noisy, "train mode with dropout or batch norm"),
        ):
            if found:
                raise Declined(reason)


def parts(item: Any) -> dict[str, Any]:
    """The attributes and submodules of a module; none of anything else."""
    return {**vars(item), **vars(item).get("_modules", {})} if isinstance(item, nn.Module) else {}


def variant(owner: Any, **attributes: Any) -> Any:
    """A shallow copy of an object with other attributes. Its own methods are bound to the copy."""
    twin = object.__new__(type(owner))
    vars(twin).update(vars(owner))
    for name, value in vars(owner).items():
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            vars(twin)[name] = types.MethodType(value.__func__, twin)
    vars(twin).update(attributes)
    return twin


def frozen(module: nn.Module, tensor: NewTensor = lambda m, name, t: t, copies: dict[int, Any] | None = None) -> Any:
    """A copy of a module as it is now; `tensor` gives each tensor, from its module, its name and the one there is."""
    copies = {} if copies is None else copies  # by the id of the module: parts may be shared
    if id(module) not in copies:
        twin = copies[id(module)] = variant(module)
        for store in ("_parameters", "_buffers"):
            found = vars(module)[store].items()
            vars(twin)[store] = {k: t if t is None else tensor(module, k, t) for k, t in found}
        children = module._modules.items()
        vars(twin)["_modules"] = {k: m if m is None else frozen(m, tensor, copies) for k, m in children}
    return copies[id(module)]


@contextmanager
def library_mode() -> Iterator[None]:
    """Run code of another library outside inference mode: it may keep tensors for later calls."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield
