"""The flows that every law is tested on.

A fresh TarFlow or MAF is a constant map on which every decoder agrees trivially, so the weights of
these are perturbed until sweeps have work to do; `test_laws.py` checks that they have.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Cache, Conditioner, Start, take
from jacobiflow.flows.transformer import TransformerConditioner
from jacobiflow.kernels.backend import bind
from jacobiflow_lab.lattice.lattice_flow import LatticeConfig, LatticeFlow


@dataclass(frozen=True)
class Subject:
    """A flow and what it is conditioned on."""

    flow: jf.Flow
    guidance: jf.Guidance = field(default_factory=jf.Guidance)
    labelled: bool = False
    in_c: bool = True  # whether the C backend supports it

    @property
    def length(self) -> int:
        return self.flow.latent_shape[0]

    def condition(self, n: int, start: int = 0) -> dict[str, Any]:
        """Labels or context of rows start .. start + n - 1; each row has its own."""
        like = next(self.flow.parameters())
        if self.labelled:
            return {"labels": (torch.arange(start, start + n) * 7) % 4 - 1}
        if self.flow.context_features:
            rows = torch.randn(256, self.flow.context_features, generator=torch.Generator().manual_seed(5))
            return {"context": rows[start : start + n].to(like)}
        return {}

    def decode(self, z: Tensor, plan: Any, **options: Any) -> jf.Decoded:
        if self.guidance.weight:
            options["guidance"] = self.guidance
        return self.flow.decode(z, plan, **(self.condition(len(z)) | options))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z and log |dz/dx| under the subject's guidance."""
        condition = self.flow._condition(len(x), **({"labels": None, "context": None} | self.condition(len(x))))
        z, log_det = self.flow._encode(self.flow.to_sequence(x), condition, self.guidance)
        return z.reshape(len(x), *self.flow.latent_shape), log_det

    def block(self, i: int, n: int, backend: Any = None) -> jf.Block:
        """Block i in sampling order, bound for n rows."""
        return self.flow.bound_blocks(n, **self.condition(n), guidance=self.guidance, backend=backend)[i]


@dataclass(frozen=True)
class RescaledConditioner:
    """A conditioner of data c x; theta ends with the scale of each position's latent."""

    inner: Conditioner
    c: float
    s: Tensor  # [T]

    @property
    def length(self) -> int:
        return self.inner.length

    def select(self, rows: Tensor) -> RescaledConditioner:
        return replace(self, inner=self.inner.select(rows))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors()

    def new_cache(self, n: int) -> Cache:
        return self.inner.new_cache(n)

    def _with_scale(self, theta: Tensor, start: Start) -> Tensor:
        scales = take(self.s[None, :, None].expand(len(theta), -1, -1), start, theta.shape[1])
        return torch.cat((theta, scales), -1)

    def first(self, n: int) -> Tensor:
        return self._with_scale(self.inner.first(n), 0)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return self._with_scale(self.inner.params(x / self.c, start, width, cache), start)

    def all_params(self, x: Tensor) -> Tensor:
        return self._with_scale(self.inner.all_params(x / self.c), 0)


@dataclass(frozen=True)
class RescaledBijector:
    """The elementwise map of data c x and latents s z."""

    inner: Bijector
    c: float
    params: int = 0

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        s = theta[..., -1:]
        z, slope = self.inner.forward(x / self.c, theta[..., :-1])
        return z * s, slope - math.log(self.c) + s.log()

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        s = theta[..., -1:]
        x, slope = self.inner.inverse(z / s, theta[..., :-1])
        return x * self.c, slope + math.log(self.c) - s.log()


def rescaled(block: jf.Block, c: float, s: Tensor) -> jf.Block:
    """A block over data c x and latents s_t z_t, of `block` over x and z. Give c and s as powers of two."""
    conditioner = RescaledConditioner(block.conditioner, c, s)
    return bind(conditioner, RescaledBijector(block.bijector, c), block.order, "torch")


def perturb(flow: jf.Flow, scale: float, seed: int = 0) -> jf.Flow:
    """Noise on every weight, relative to the fan-in, so that positions depend on each other."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in flow.named_parameters():
            std = scale / p.shape[-1] ** 0.5 if p.ndim == 2 and "embed" not in name else 0.1 * scale
            p += std * torch.randn(p.shape, generator=draw)
        if isinstance(flow, jf.TarFlow) and flow.config.volume_preserving:
            flow.var += torch.rand(flow.var.shape, generator=draw)
        if isinstance(flow, LatticeFlow) and flow.linear is not None:
            flow.linear += 0.5 / len(flow.linear) ** 0.5 * torch.randn(flow.linear.shape, generator=draw)
    return flow


def turned(t: Tensor, at: Tensor) -> Tensor:
    """t [n, heads, s, head_dim] rotated by angles that grow with the position."""
    a, b = t.chunk(2, -1)
    angle = at[..., None, :, None] / 10 ** torch.linspace(0, 2, a.shape[-1], dtype=t.dtype)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class Rotary(TransformerConditioner):
    """RoPE: attention by relative position."""

    def place(self, q: Tensor, k: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return turned(q, inputs), turned(k, inputs)


class RotaryFlow(jf.TarFlow):
    """A TarFlow with another conditioner."""

    def bind(self, *args: Any) -> tuple[Conditioner, Bijector]:
        conditioner, bijector = super().bind(*args)
        return Rotary(**vars(conditioner)), bijector


def tarflow(by: float, seed: int = 0, family: type[jf.TarFlow] = jf.TarFlow, **options: Any) -> jf.Flow:
    shape = {"image_size": 8, "image_channels": 1, "patch_size": 2, "width": 32, "head_dim": 16}
    shape |= {"blocks": 3, "layers_per_block": 2, "noise_std": 0.1}
    torch.manual_seed(seed)
    return perturb(family(jf.TarFlowConfig(**(shape | options))), by, seed)


MAF_SHAPE: dict[str, Any] = {"features": 19, "blocks": 3, "hidden": (48, 40)}


def maf(by: float, seed: int = 0, **options: Any) -> jf.Flow:
    torch.manual_seed(seed)
    return perturb(jf.MAF(jf.MAFConfig(**(MAF_SHAPE | options))), by, seed)


def lattice(by: float, seed: int = 0, **options: Any) -> jf.Flow:
    torch.manual_seed(seed)
    return perturb(LatticeFlow(LatticeConfig(**(MAF_SHAPE | options))), by, seed)


def overflowing(features: int = 4) -> jf.Flow:
    """A MAF whose samples overflow where the last number of the noise is positive, and else do not."""
    flow = maf(1.0, features=features, blocks=2, hidden=(6,), scale="exp").float()
    net: Any = flow.blocks[1]  # next to the noise; it goes backwards
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        unit = net.degrees[1].tolist().index(1)
        net.linears[0].weight[unit, 0] = 1.0
        net.head.weight[2, unit] = 1e6  # log-scale of its second position
    return flow


G = jf.Guidance
MAKERS = {
    "tarflow": lambda: Subject(tarflow(0.2)),
    "tarflow-labels": lambda: Subject(tarflow(0.2, num_classes=3), labelled=True),
    "tarflow-shift": lambda: Subject(tarflow(0.3, volume_preserving=True, num_classes=3), labelled=True),
    "tarflow-guided": lambda: Subject(tarflow(0.2, num_classes=3), G(weight=1.5), labelled=True),
    "tarflow-guided-a": lambda: Subject(tarflow(0.2, num_classes=3), G(weight=1.5, what="a"), labelled=True),
    "tarflow-guided-b": lambda: Subject(tarflow(0.2, num_classes=3), G(weight=1.5, what="b"), labelled=True),
    "tarflow-annealed": lambda: Subject(tarflow(0.2, num_classes=3), G(weight=2, annealed=True), labelled=True),
    "tarflow-attn-temp": lambda: Subject(tarflow(0.2), G(weight=1.0, attn_temp=1.5)),
    "tarflow-shift-guided": lambda: Subject(
        tarflow(0.3, volume_preserving=True, num_classes=3), G(weight=1.0, what="b"), labelled=True
    ),
    "tarflow-rotary": lambda: Subject(tarflow(0.2, family=RotaryFlow, num_classes=3), labelled=True, in_c=False),
    "maf-affine": lambda: Subject(maf(1.1)),
    "maf-sigmoid": lambda: Subject(maf(1.2, scale="sigmoid")),
    "maf-exp": lambda: Subject(maf(1.3, scale="exp")),
    "maf-context": lambda: Subject(maf(1.1, context=3)),
    "maf-permuted": lambda: Subject(maf(1.1, order="random")),
    "maf-residual": lambda: Subject(maf(0.5, hidden=(32, 32, 32), residual=True)),
    "maf-deep": lambda: Subject(maf(1.3, hidden=(40, 24, 56), activation="tanh")),
    "maf-linear": lambda: Subject(lattice(1.1, linear=True)),
    "maf-lattice": lambda: Subject(
        lattice(1.5, features=25, reach=2, hidden=(24, 16), order="random", activation="tanh"),
        in_c=False,
    ),
    "nsf-lattice": lambda: Subject(
        lattice(0.7, features=25, reach=2, hidden=(24,), transform="spline", linear=True, activation="silu"),
        in_c=False,
    ),
    "nsf": lambda: Subject(maf(0.9, transform="spline")),
    "nsf-context": lambda: Subject(
        maf(0.4, transform="spline", context=2, order="random", residual=True, hidden=(32, 32), bins=5)
    ),
}
NAMES = list(MAKERS)


@functools.cache
def subject(name: str, dtype: torch.dtype = torch.float64) -> Subject:
    """A subject by name; made once per run."""
    made = MAKERS[name]()
    made.flow.to(dtype).eval().requires_grad_(False)
    return made
