"""A GAN for few images and little time, after FastGAN (Liu et al., 2021), reimplemented and sized for CPUs.

It has the two ideas of FastGAN. Skip-layer excitation: features of a low resolution gate the channels of a
high one in the generator. A self-supervised discriminator: small decoders rebuild the real image, and a
piece of it, from its features.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from jacobiflow.core.files import FileError, read_text, write_atomically
from jacobiflow.core.records import RecordError, build, parse_json
from jacobiflow_lab.baselines.learner import BaselineError, Learner, noise

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SLOPE = 0.2  # of leaky ReLUs


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of both networks and how they are trained."""

    image_size: int
    image_channels: int = 3
    latent: int = 128
    width: int = 32  # channels at the full resolution; each halving doubles them
    most: int = 256  # most channels at any resolution
    batch_size: int = 32
    lr: float = 2e-4
    warmup: int = 1
    ema: float = 0.999
    rebuild: float = 1.0  # weight of the discriminator's own task
    flip: bool = False

    def __post_init__(self) -> None:
        if self.doublings < 2:
            raise BaselineError(f"images must be 4 to 7 pixels times 4, 8, 16, ..., not {self.image_size}")

    @property
    def doublings(self) -> int:
        """Doublings from the first resolution, 4 to 7 pixels, to the full one; -1: impossible."""
        return next((k for k in range(2, 9) if self.image_size in (a * 2**k for a in range(4, 8))), -1)

    @property
    def start(self) -> int:
        """Pixels of the first resolution."""
        return self.image_size >> self.doublings

    def channels(self, halvings: int) -> int:
        """Channels after this many halvings of the full resolution."""
        return min(self.width << halvings, self.most)


class Up(nn.Sequential):
    """Twice the resolution; a gated linear unit halves the channels of the convolution."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(before, 2 * after, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * after),
            nn.GLU(1),
        )


class Excite(nn.Module):
    """Skip-layer excitation: channels of `high` times a gate in [0, 1] made of all of `low`."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Conv2d(low, high, 4), nn.SiLU(), nn.Conv2d(high, high, 1), nn.Sigmoid()
        )

    def forward(self, high: Tensor, low: Tensor) -> Tensor:
        return high * self.gate(low)  # type: ignore[no-any-return]


class Generator(nn.Module):
    """The generator: noise [B, latent] to images [B, C, S, S] in [-1, 1]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        top = config.doublings
        widths = [config.channels(top - k) for k in range(top + 1)]
        self.first = nn.Sequential(
            nn.ConvTranspose2d(config.latent, 2 * widths[0], config.start, bias=False),
            nn.BatchNorm2d(2 * widths[0]),
            nn.GLU(1),
        )
        self.ups = nn.ModuleList(Up(a, b) for a, b in pairwise(widths))
        # From each resolution to the one four times as high.
        self.excites = nn.ModuleList(Excite(widths[k], widths[k + 2]) for k in range(top - 1))
        self.last = nn.Conv2d(widths[-1], config.image_channels, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0, 0.02)

    def forward(self, z: Tensor) -> Tensor:
        seen = [self.first(F.normalize(z, dim=1).unsqueeze(-1).unsqueeze(-1) * z.shape[1] ** 0.5)]
        for k, up in enumerate(self.ups):
            h = up(seen[-1])
            seen.append(self.excites[k - 1](h, seen[k - 1]) if k else h)
        return self.last(seen[-1]).tanh()  # type: ignore[no-any-return]


class Down(nn.Module):
    """Half the resolution, by convolutions beside a plain mean.

    Spectral norms alone shrink the signal until the discriminator hardly tells images apart; batch
    norms restore its size.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            spectral_norm(nn.Conv2d(before, after, 4, 2, 1, bias=False)),
            nn.BatchNorm2d(after),
            nn.LeakyReLU(SLOPE),
            spectral_norm(nn.Conv2d(after, after, 3, padding=1, bias=False)),
            nn.BatchNorm2d(after),
        )
        self.skip = nn.Sequential(
            nn.AvgPool2d(2), spectral_norm(nn.Conv2d(before, after, 1, bias=False)), nn.BatchNorm2d(after)
        )

    def forward(self, h: Tensor) -> Tensor:
        return F.leaky_relu((self.main(h) + self.skip(h)) * 0.5**0.5, SLOPE)


class Discriminator(nn.Module):
    """The discriminator: how real each part of an image looks, and features that decoders rebuild it from."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.channels(k) for k in range(config.doublings + 1)]
        self.first = spectral_norm(nn.Conv2d(config.image_channels, widths[0], 3, padding=1))
        self.downs = nn.ModuleList(Down(a, b) for a, b in pairwise(widths))
        self.last = spectral_norm(nn.Conv2d(widths[-1], 1, 3, padding=1))
        colours = config.image_channels
        self.whole = nn.Sequential(Up(widths[2], widths[1]), nn.Conv2d(widths[1], colours, 3, padding=1))
        self.piece = nn.Sequential(Up(widths[1], widths[0]), nn.Conv2d(widths[0], colours, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Scores [B, 1, h, w], and the features after each halving."""
        h, seen = F.leaky_relu(self.first(x), SLOPE), []
        for down in self.downs:
            h = down(h)
            seen.append(h)
        return self.last(h), seen

    def rebuild(self, x: Tensor, seen: list[Tensor], draw: torch.Generator) -> Tensor:
        """Mean absolute error of the image at half its size, rebuilt from a quarter of its resolution, and of
        a random quarter of the image, rebuilt from the features of that place."""
        half, quarter = seen[0], seen[1]
        whole = (self.whole(quarter) - F.avg_pool2d(x, 2)).abs().mean()
        size = half.shape[2] // 2
        top, left = (int(v) for v in torch.randint(half.shape[2] - size + 1, (2,), generator=draw))
        place = self.piece(half[..., top : top + size, left : left + size])
        part = x[..., 2 * top : 2 * (top + size), 2 * left : 2 * (left + size)]
        return whole + (place - part).abs().mean()  # type: ignore[no-any-return]


class FastGANLearner(Learner):
    """Hinge losses for both networks, and the discriminator's self-supervised loss."""

    config_type: ClassVar[type[Config]] = Config
    config: Config

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.generator, self.discriminator = Generator(config), Discriminator(config)
        model = nn.ModuleDict({"generator": self.generator, "discriminator": self.discriminator}).to(device)
        # One optimizer for both: a step skips weights without a gradient, and only one side has gradients.
        self.begin(model, self.generator, torch.optim.Adam(model.parameters(), lr=config.lr, betas=(0.5, 0.999)))

    def learn(self, x: Tensor, draw: torch.Generator) -> dict[str, float]:
        self.model.train()
        z = torch.randn(2, len(x), self.config.latent, generator=draw).to(x)
        with torch.no_grad():
            fake = self.generator(z[0])
        score, seen = self.discriminator(x)
        other, _ = self.discriminator(fake)
        judged = F.relu(1 - score).mean() + F.relu(1 + other).mean()
        rebuilt = self.discriminator.rebuild(x, seen, draw)
        self._descend(judged + self.config.rebuild * rebuilt)
        self.discriminator.requires_grad_(False)
        painted = -self.discriminator(self.generator(z[1]))[0].mean()
        self._descend(painted)
        self.discriminator.requires_grad_(True)
        return {"discriminator": judged.item(), "generator": painted.item(), "rebuild": rebuilt.item()}

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def export(self, folder: Path) -> None:
        """The generator with averaged weights."""
        tensors = {k: v.cpu().contiguous() for k, v in self.average.state_dict().items()}
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path))
        text = json.dumps({"kind": "fastgan", **asdict(self.config)}, indent=2) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class FastGAN:
    """A trained generator."""

    generator: Generator
    config: Config

    @torch.inference_mode()
    def sample(self, n: int, *, seed: int, start: int = 0) -> Tensor:
        """Pictures [n, C, H, W] in [-1, 1]; picture i depends on (seed, i) only."""
        z = noise(n, (self.config.latent,), seed, start, next(self.generator.parameters()))
        return self.generator(z)  # type: ignore[no-any-return]


def load(source: str | Path, device: torch.device | str = "cpu") -> FastGAN:
    """Load a folder written by training."""
    folder = Path(source)
    try:
        doc = parse_json(read_text(folder / CONFIG))
        if not isinstance(doc, dict) or doc.pop("kind", None) != "fastgan":
            raise BaselineError(f"{folder / CONFIG} is not the config of a fastgan")
        doc.pop("augment", None)  # in earlier checkpoints: how they were trained
        config = build(Config, doc, str(folder / CONFIG))
        generator = Generator(config)
        generator.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, FileError, RecordError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BaselineError(f"{folder} is not a fastgan checkpoint: {reason[:200]}") from None
    return FastGAN(generator.to(device).eval().requires_grad_(False), config)
