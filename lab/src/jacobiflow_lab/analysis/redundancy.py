"""How much a block needs the nearest predecessors of a position: generation with them masked.

The paper's Eq. 6 gives position l the parameters that the network computes from x_{<(l - o)} instead of
x_{<l}, "by masking out the nearest o preceding sub-variables in the attention operation". The equation and
the quoted words differ, and both variants are here:

"attention": the keys of the o nearest predecessors are dropped in every layer. The parameters of l are read
    from the residual stream at l - 1, which still holds x_{l-1}: this masks attention, not information.
"strict": the parameters of l are the network's answer to x_{<(l - o)}, which are those of position l - o. No
    masked value has any influence. Positions with no predecessor left take the parameters of the first
    position. For a transformer that is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from jacobiflow.core.arguments import as_int, word
from jacobiflow.core.block import Block, Cache, Conditioner, Start, WrappedConditioner
from jacobiflow.core.decode import decode
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guided
from jacobiflow.flows.transformer import TransformerConditioner
from jacobiflow.kernels.backend import bind
from jacobiflow_lab.analysis.exact_blocks import SEQUENTIAL, Record, exact_blocks

Variant = Literal["attention", "strict"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
OFFSETS = (1, 2, 5)  # the paper's


@dataclass(frozen=True)
class StrictlyMasked(WrappedConditioner):
    """A conditioner whose position l reads only x_{<(l - o)}: theta'_l = theta_{max(l - o, 0)}."""

    o: int

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
    word("variant", variant, VARIANTS)
    return bind(_masked(block.conditioner, as_int("o", o), variant), block.bijector, block.order, "torch")


def _masked(conditioner: Conditioner, o: int, variant: Variant) -> Conditioner:
    if isinstance(conditioner, Guided):
        return replace(conditioner, inner=_masked(conditioner.inner, o, variant))
    if variant == "strict":
        return StrictlyMasked(conditioner, o) if o else conditioner
    if not isinstance(conditioner, TransformerConditioner):
        raise ValueError("only transformers have an attention to mask: use the variant 'strict'")
    return replace(conditioner, skip=o)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a block's masked output is from its standard one, means over the samples."""

    cosine: float  # similarity of the two
    l2: float  # distance between them
    l2_error: float  # its standard error; 0 for one sample
    relative: float  # that distance over the norm of the standard output
    lost: int  # samples that are not finite and are left out of the means


@dataclass(frozen=True, kw_only=True)
class Masked:
    """One way of masking; blocks (`layers` in the JSON), the one next to the noise first."""

    variant: Variant
    o: int
    layers: tuple[Deviation, ...]  # only this block is masked, its input is exact
    along: tuple[Deviation, ...]  # all blocks up to it are masked, as in x
    x: Tensor = field(repr=False)  # samples with every block masked


@dataclass(frozen=True, kw_only=True)
class Redundancy(Record):
    """All ways of masking, for the same noise."""

    samples: int
    exact: Tensor = field(repr=False)
    masked: tuple[Masked, ...]


def redundancy(
    flow: Flow,
    z: Tensor,
    *,
    variants: Sequence[Variant] | None = None,
    offsets: Sequence[int] = OFFSETS,
    **condition: Any,
) -> Redundancy:
    """Similarity and distance of masked and standard inference for every variant and o.

    variants: default: all that the flow has. condition: see `exact_blocks`.
    """
    blocks = list(exact_blocks(flow, z, **condition))
    masked = []
    for variant in variants or (VARIANTS if flow.family == "tarflow" else ("strict",)):
        for o in offsets:
            seq, alone, along = flow.to_prior(z), [], []
            for block, exact_z, exact_x in blocks:
                masked_block = mask(block, o, variant)
                alone.append(deviation(decode(masked_block, exact_z, SEQUENTIAL).x, exact_x))
                seq = decode(masked_block, seq, SEQUENTIAL).x
                along.append(deviation(seq, exact_x))
            x = flow.from_sequence(seq)
            masked.append(Masked(variant=variant, o=o, layers=tuple(alone), along=tuple(along), x=x))
    return Redundancy(samples=len(z), exact=flow.from_sequence(blocks[-1][2]), masked=tuple(masked))


def deviation(x: Tensor, standard: Tensor) -> Deviation:
    """Means over samples of the cosine similarity and L2 distance of two block outputs [N, T, D]."""
    a, b = x.flatten(1).double(), standard.flatten(1).double()
    keep = a.isfinite().all(1) & b.isfinite().all(1)
    a, b = a[keep], b[keep]
    distance, size = (a - b).norm(dim=1), b.norm(dim=1)
    return Deviation(
        cosine=float(torch.cosine_similarity(a, b).mean()),
        l2=float(distance.mean()),
        l2_error=float(distance.std() / len(distance) ** 0.5) if len(distance) > 1 else 0.0,
        relative=float((distance / size).mean()),
        lost=int((~keep).sum()),
    )
