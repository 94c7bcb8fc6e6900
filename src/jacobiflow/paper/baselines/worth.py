"""Whether a baseline is one: it has to be clearly better than real images whose pixels were shuffled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.data.sources import Images
from jacobiflow.metrics import features, fid_of, kid, load_inception
from jacobiflow.paper.baselines.learner import Generator

CLEARLY = 0.7  # of the shuffled images' FID and KID: what a baseline may have at most


@dataclass(frozen=True, kw_only=True)
class Worth:
    """FID and KID against real images: the baseline's, and those of shuffled real images."""

    samples: int
    real: int
    fid: float
    kid: float
    shuffled_fid: float
    shuffled_kid: float

    @property
    def counts(self) -> bool:
        """Whether it is clearly better than shuffled images, by both."""
        return self.fid < CLEARLY * self.shuffled_fid and self.kid < CLEARLY * self.shuffled_kid

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the verdict."""
        return asdict(self) | {"counts": self.counts, "clearly": CLEARLY}


def shuffle_pixels(pixels: Tensor, seed: int = 0) -> Tensor:
    """Each image [N, C, H, W] with its pixels in another order: the same colours, no picture."""
    flat = pixels.flatten(2)
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=draw).argsort(2).to(pixels.device)
    return flat.gather(2, order.expand_as(flat)).reshape(pixels.shape)


def worth(
    baseline: Generator,
    real: Images,
    *,
    n: int = 500,
    seed: int = 0,
    batch: int = 50,
    see: Callable[[Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Worth:
    """Compare n samples, and n shuffled real images, with the real images.

    real: held-out images; half of them, evenly spaced, are shuffled, the other half is the reference, so that
    no image is compared with itself. see: features [N, D] of images in [-1, 1] or uint8; None is the FID
    network's.
    """
    if see is None:
        network = load_inception(device=device)

        def see(x: Tensor) -> Tensor:
            return features(x, network)

    kept, mixed = real.pixels[0::2][:n], shuffle_pixels(real.pixels[1::2][:n], seed)
    drawn = torch.cat(
        [see(baseline.sample(min(batch, n - i), seed=seed, start=i)) for i in range(0, n, batch)]
    )
    known, other = (
        torch.cat([see(x[i : i + batch].to(device)) for i in range(0, len(x), batch)]) for x in (kept, mixed)
    )
    return Worth(
        samples=n,
        real=len(kept),
        fid=fid_of(known, drawn).value,
        kid=kid(known, drawn).value,
        shuffled_fid=fid_of(known, other).value,
        shuffled_kid=kid(known, other).value,
    )
