"""How much a block needs the nearest predecessors of a position: generation with them masked.

The paper's Eq. 6 gives position l the parameters that the network makes of x_{<(l - o)} instead of x_{<l},
"by masking out the nearest o preceding sub-variables in the attention operation". The two halves of that
sentence are two things, and both are here:

"attention": the keys of the o nearest predecessors are dropped in every layer. The residual stream at l - 1,
    which the parameters of l are read from, still holds x_{l-1}: this masks attention, not the information.
"strict": the parameters of l are the network's own answer to x_{<(l - o)}, and so those of position l - o.
    No hidden value gets through; positions without a predecessor left take the parameters of the first one,
    which has none. For a transformer that is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from jacobiflow.core.block import Block, Cache, Conditioner, Start
from jacobiflow.core.decode import decode
from jacobiflow.core.types import Method
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guided
from jacobiflow.flows.transformer import TransformerConditioner
from jacobiflow.kernels.backend import bind
from jacobiflow_lab.analysis.layers import exact_layers, plain

Variant = Literal["attention", "strict"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
OFFSETS = (1, 2, 5)  # the paper's
SEQUENTIAL = Method(width=1)


@dataclass(frozen=True)
class StrictlyMasked:
    """A conditioner whose position l sees only what stands before l - o: theta'_l = theta_{max(l - o, 0)}."""

    inner: Conditioner
    o: int

    @property
    def length(self) -> int:
        return self.inner.length

    def select(self, rows: Tensor) -> StrictlyMasked:
        return replace(self, inner=self.inner.select(rows))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors()

    def new_cache(self, n: int) -> Cache:
        return self.inner.new_cache(n)

    def first(self, n: int) -> Tensor:
        return self.inner.first(n)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        begin = start - self.o
        if not isinstance(begin, int):
            inner = begin.clamp_min(1)
            theta = torch.cat((self.first(len(x)), self.inner.params(x, inner, width, cache)), 1)
            places = (begin - inner + 1)[:, None] + torch.arange(width, device=x.device)
            return theta.gather(1, places.clamp_min(0)[..., None].expand(-1, -1, theta.shape[-1]))
        end = begin + width
        known = [self.first(len(x)).expand(-1, min(1 - begin, width), -1)] if begin < 1 else []
        if end > 1:
            known.append(self.inner.params(x, max(begin, 1), end - max(begin, 1), cache))
        return torch.cat(known, 1)

    def all_params(self, x: Tensor) -> Tensor:
        places = torch.arange(self.length, device=x.device) - self.o
        return self.inner.all_params(x)[:, places.clamp_min(0)]


def mask(block: Block, o: int, variant: Variant) -> Block:
    """The block without its o nearest predecessors; o = 0 is the block itself."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {variant!r}")
    if o < 0:
        raise ValueError(f"o must be 0 or more, not {o}")
    return bind(_masked(block.conditioner, o, variant), block.bijector, block.order, "torch")


def _masked(conditioner: Conditioner, o: int, variant: Variant) -> Conditioner:
    if isinstance(conditioner, Guided):
        return replace(conditioner, both=_masked(conditioner.both, o, variant))
    if variant == "strict":
        return StrictlyMasked(conditioner, o) if o else conditioner
    if not isinstance(conditioner, TransformerConditioner):
        raise ValueError("only transformers have an attention to mask: use the variant 'strict'")
    return replace(conditioner, skip=o)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a layer's masked output is from its standard one, means over the samples."""

    cosine: float  # similarity of the two
    l2: float  # distance between them
    relative: float  # that distance in units of the standard output's norm
    lost: int  # samples that overflowed and are left out of the means


@dataclass(frozen=True, kw_only=True)
class Masked:
    """One way of masking: each layer, the one next to the noise first."""

    variant: Variant
    o: int
    layers: tuple[Deviation, ...]  # the layer alone is masked, its input is exact
    along: tuple[Deviation, ...]  # all layers up to it are masked, as in the generations x
    x: Tensor = field(repr=False)  # samples with every layer masked


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """All ways of masking, of the same noise."""

    samples: int
    exact: Tensor = field(repr=False)
    masked: tuple[Masked, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the pictures."""
        return plain(self)


def variants_of(flow: Flow) -> tuple[Variant, ...]:
    """The variants that a flow has."""
    return VARIANTS if flow.family == "tarflow" else ("strict",)


def redundancy(
    flow: Flow,
    z: Tensor,
    *,
    variants: Sequence[Variant] | None = None,
    offsets: Sequence[int] = OFFSETS,
    progress: Callable[[str], None] = lambda _: None,
    **condition: Any,
) -> Redundancy:
    """Similarity and distance of masked and standard inference for every variant and o.

    variants: None is all that the flow has. condition: see `exact_layers`.
    """
    layers = list(exact_layers(flow, z, **condition))
    exact = flow.from_sequence(layers[-1].x)
    found = []
    for variant in variants_of(flow) if variants is None else variants:
        for o in offsets:
            progress(f"{variant}, o = {o}")
            seq, alone, along = flow.to_prior(z), [], []
            for layer in layers:
                block = mask(layer.block, o, variant)
                alone.append(deviation(decode(block, layer.z, SEQUENTIAL).x, layer.x))
                seq = decode(block, seq, SEQUENTIAL).x
                along.append(deviation(seq, layer.x))
            found.append(
                Masked(
                    variant=variant,
                    o=o,
                    layers=tuple(alone),
                    along=tuple(along),
                    x=flow.from_sequence(seq),
                )
            )
    return Redundancy(samples=len(z), exact=exact, masked=tuple(found))


def deviation(x: Tensor, standard: Tensor) -> Deviation:
    """Cosine similarity and L2 distance of two layer outputs [N, T, D], sample by sample, then the mean."""
    a, b = x.flatten(1).double(), standard.flatten(1).double()
    keep = a.isfinite().all(1) & b.isfinite().all(1)
    a, b = a[keep], b[keep]
    distance, size = (a - b).norm(dim=1), b.norm(dim=1)
    return Deviation(
        cosine=float(torch.cosine_similarity(a, b).mean()),
        l2=float(distance.mean()),
        relative=float((distance / size).mean()),
        lost=int((~keep).sum()),
    )
