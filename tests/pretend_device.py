"""A pretend accelerator, for machines without one: `python pretend_device.py` decodes on it and on the CPU.

Tensors on the device "sim" keep their numbers on the CPU, but torch treats them as tensors of another device:
mixing them with tensors of the CPU is an error, as it is on CUDA. Running it changes torch for the whole
process (`inference_mode` becomes `no_grad`), so that tests start it as a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

MIXED = {"copy_", "_to_copy", "_copy_from", "to", "index", "index_put_", "index_put", "_index_put_impl_"}
MADE = (
    *(
        "empty.memory_format",
        "empty_strided",
        "arange",
        "arange.start",
        "arange.start_step",
        "randperm",
        "eye",
    ),
    *("linspace", "tril_indices", "scalar_tensor"),
)


class SimTensor(Tensor):
    """A tensor of the device; `raw` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> SimTensor:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, device=torch.device("sim:0"), **layout)
        made.raw = raw
        return made

    def tolist(self) -> Any:
        return self.raw.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a sim tensor to numpy: use .cpu() first")

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, dict(kwargs or {}))


def unwrap(t: Any) -> Any:
    return t.raw if isinstance(t, SimTensor) else t


def wrap(t: Any) -> Any:
    return SimTensor(t) if isinstance(t, Tensor) and not isinstance(t, SimTensor) else t


def run(op: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the numbers of its arguments; its results are on the device."""
    name = op._schema.name.split("::")[1]
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor) and not isinstance(t, SimTensor) and t.ndim and name not in MIXED:
            raise RuntimeError(f"{name}: expected all tensors on sim, found a cpu tensor {list(t.shape)}")
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    raw_args, raw_kwargs = tree_map(unwrap, (args, kwargs))
    with torch.no_grad():
        out = op(*raw_args, **raw_kwargs)
    if to_host or name == "_local_scalar_dense":
        return out
    writes = [s.alias_info is not None and s.alias_info.is_write for s in op._schema.arguments]
    written = [a for a, write in zip(args, writes, strict=False) if write]
    return written[0] if written else tree_map(wrap, out)


def maker(op: Any) -> Callable[..., SimTensor]:
    def make(*args: Any, **kwargs: Any) -> SimTensor:
        return SimTensor(op(*args, **(kwargs | {"device": torch.device("cpu"), "pin_memory": None})))

    return make


def copy_from(src: Any, dst: Any, non_blocking: bool = False) -> Any:
    unwrap(dst).copy_(unwrap(src))
    return dst


def install() -> torch.library.Library:
    """Register the device; it lasts as long as the result."""
    _setup_privateuseone_for_python_backend("sim")
    aten = torch.library.Library("aten", "IMPL")
    for full in MADE:
        packet, _, overload = full.partition(".")
        aten.impl(full, maker(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()  # type: ignore
    return aten


def main() -> None:
    """Print how far every way to decode is from the CPU."""
    import jacobiflow as jf
    from jacobiflow.flows.compare import has_plain_loop, plain_tarflow
    from subjects import subject

    for name in sys.argv[1:]:
        one = subject(name)
        flow, z, given = one.flow, one.flow.noise(3, seed=1), one.condition(3)
        window = jf.Plan((jf.Method(width=4, tol=1e-3),) * len(flow.blocks))
        for plan in ("sequential", "uniform", "selective", "auto", window):
            there = {k: v.to("sim") for k, v in given.items()}
            options = {"guidance": one.guidance, "check": True}
            out = flow.to("sim").decode(z.to("sim"), plan, **there, **options)
            assert out.x.device.type == "sim"
            want = flow.to("cpu").decode(z, out.stats.plan, **given, **options, backend="torch")
            print(name, out.stats.plan[0].width, float((out.x.cpu() - want.x).abs().max()))
        if has_plain_loop(flow, one.guidance):  # labels may stay on the CPU, as `decode` allows
            there = plain_tarflow(flow.to("sim"), z.to("sim"), given.get("labels"))
            want = plain_tarflow(flow.to("cpu"), z, given.get("labels"))
            print(name, "plain", float((there.cpu() - want).abs().max()))


if __name__ == "__main__":
    device = install()
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's own threads know nothing of the device, and would abort at exit
