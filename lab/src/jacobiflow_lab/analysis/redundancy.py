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

from jacobiflow.core.decode import sequential
from jacobiflow.core.types import Block, Cache
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import GuidedBlock
from jacobiflow.flows.tarflow import BoundPatchBlock
from jacobiflow_lab.analysis.layers import exact_layers, plain

Variant = Literal["attention", "strict"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
OFFSETS = (1, 2, 5)  # the paper's


@dataclass(frozen=True)
class StrictlyMasked:
    """A block whose position l sees only what stands before l - o: theta'_l = theta_{max(l - o, 0)}."""

    block: Block
    o: int

    @property
    def length(self) -> int:
        return self.block.length

    @property
    def rows(self) -> int | None:
        return self.block.rows

    def select(self, rows: Tensor) -> StrictlyMasked:
        return replace(self, block=self.block.select(rows))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.block.tensors()

    def new_cache(self, n: int) -> Cache:
        return self.block.new_cache(n)

    def params(self, x: Tensor, lo: int, hi: int, cache: Cache | None = None) -> Tensor:
        first, end = max(lo - self.o, 0), max(hi - self.o, 1)
        theta = self.block.params(x, first, end, cache)
        places = (torch.arange(lo, hi, device=x.device) - self.o).clamp_min(0) - first
        return theta[:, places]

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.forward(x, theta)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.inverse(z, theta)


def mask(block: Block, o: int, variant: Variant) -> Block:
    """The block without its o nearest predecessors; o = 0 is the block itself."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {variant!r}")
    if o < 0:
        raise ValueError(f"o must be 0 or more, not {o}")
    if isinstance(block, GuidedBlock):
        return replace(block, block=mask(block.block, o, variant), null=mask(block.null, o, variant))
    if variant == "strict":
        return StrictlyMasked(block, o)
    if not isinstance(block, BoundPatchBlock):
        raise ValueError("only transformers have an attention to mask: use the variant 'strict'")
    return replace(block, skip=o)


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
    exact = flow.from_sequence(layers[-1].give(layers[-1].x))
    found = []
    for variant in variants_of(flow) if variants is None else variants:
        for o in offsets:
            progress(f"{variant}, o = {o}")
            seq, alone, along = flow.to_prior(z), [], []
            for layer in layers:
                block = mask(layer.block, o, variant)
                alone.append(deviation(sequential(block, layer.z).x, layer.x))
                out = sequential(block, layer.take(seq)).x
                along.append(deviation(out, layer.x))
                seq = layer.give(out)
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
