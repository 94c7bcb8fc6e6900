"""A diffusion model through diffusers: a small UNet trained here, or any checkpoint of a UNet2DModel.

Sampling is DDIM (Song et al., 2021) in 20 steps without fresh noise, as in the paper's comparison.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.tables import pip_install
from jacobiflow_lab.baselines.learner import BaselineError, Learner, noise

STEPS = 20  # the paper's
LEVELS = 1000  # of noise, in training


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of the UNet and how it is trained; images are image_size x image_size."""

    image_size: int
    image_channels: int = 3
    channels: tuple[int, ...] = (48, 96, 96)  # of each resolution, halved from one to the next
    layers: int = 1  # blocks per resolution
    groups: int = 16  # of the group norms; divides the channels
    attention_from: int = 2  # the first resolution with attention
    batch_size: int = 32  # more steps use a budget of seconds better than larger batches
    lr: float = 5e-4
    warmup: int = 200
    ema: float = 0.999
    clip: float = 1.0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.image_size % 2 ** (len(self.channels) - 1):
            raise BaselineError(
                f"images of {self.image_size} pixels cannot be halved {len(self.channels) - 1} times: "
                "use fewer channels entries"
            )
        if any(c % self.groups for c in self.channels):
            raise BaselineError(f"groups {self.groups} does not divide all of channels {self.channels}")


def diffusers() -> Any:
    """The library, or an error that names the extra to install."""
    try:
        import diffusers as found
    except ImportError:
        raise BaselineError(f"DDIM needs diffusers: {pip_install('lab[baselines]')}") from None
    return found


def unet(config: Config) -> Any:
    """A UNet of this shape."""
    deep = range(len(config.channels))
    down = tuple("AttnDownBlock2D" if i >= config.attention_from else "DownBlock2D" for i in deep)
    return diffusers().UNet2DModel(
        sample_size=config.image_size,
        in_channels=config.image_channels,
        out_channels=config.image_channels,
        layers_per_block=config.layers,
        block_out_channels=config.channels,
        down_block_types=down,
        up_block_types=tuple(name.replace("Down", "Up") for name in reversed(down)),
        norm_num_groups=config.groups,
    )


def scheduler() -> Any:
    """A cosine schedule; the network predicts the velocity, which is well scaled at all noise levels."""
    return diffusers().DDIMScheduler(
        num_train_timesteps=LEVELS,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=True,
    )


class DDIMLearner(Learner):
    """Mean squared error of the velocity at random levels of noise."""

    config_type: ClassVar[type[Config]] = Config
    config: Config

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.schedule = config, scheduler()
        model = unet(config).to(device)
        self.begin(model, model, torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99)))

    def learn(self, x: Tensor, draw: torch.Generator) -> dict[str, float]:
        level = torch.randint(LEVELS, (len(x),), generator=draw).to(x.device)
        eps = torch.randn(x.shape, generator=draw).to(x)
        noisy = self.schedule.add_noise(x, eps, level)
        self.model.train()
        loss = F.mse_loss(self.model(noisy, level).sample, self.schedule.get_velocity(x, eps, level))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return {"loss": loss.item()}

    def export(self, folder: Path) -> None:
        """Write a pipeline that diffusers can read."""
        averaged: Any = self.average
        averaged.save_pretrained(folder / "unet", safe_serialization=True)
        self.schedule.save_pretrained(folder / "scheduler")
        version = diffusers().__version__
        index = {"_class_name": "DDIMPipeline", "_diffusers_version": version}
        index |= {"unet": ["diffusers", "UNet2DModel"], "scheduler": ["diffusers", "DDIMScheduler"]}
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class DDIM:
    """A diffusion model that samples in STEPS steps."""

    unet: Any
    schedule: Any

    @torch.inference_mode()
    def sample(self, n: int, *, seed: int, start: int = 0) -> Tensor:
        """Pictures [n, C, H, W] in [-1, 1]; picture i depends on (seed, i) only."""
        config, like = self.unet.config, next(self.unet.parameters())
        size = config.sample_size
        side = (size, size) if isinstance(size, int) else tuple(size)
        x = noise(n, (config.in_channels, *side), seed, start, like)
        self.schedule.set_timesteps(STEPS, device=like.device)
        x = x * self.schedule.init_noise_sigma
        for level in self.schedule.timesteps:
            out = self.unet(self.schedule.scale_model_input(x, level), level).sample
            x = self.schedule.step(out, level, x, eta=0.0).prev_sample
        return x.clamp(-1, 1)  # type: ignore[no-any-return]


def load(source: str | Path, device: torch.device | str = "cpu") -> DDIM:
    """Load a folder written by training, or any checkpoint of diffusers' UNet2DModel: a folder or hub id.

    The network is in `unet/` or at the top level, its schedule in `scheduler/` or at the top level. Only
    safetensors are read.
    """
    library = diffusers()
    try:
        net = _part(library.UNet2DModel, source, "unet", use_safetensors=True, low_cpu_mem_usage=False)
        schedule = _part(library.DDIMScheduler, source, "scheduler")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BaselineError(
            f"{source} is not a UNet2DModel checkpoint of diffusers with safetensors: {reason[:200]}"
        ) from None
    return DDIM(net.to(device).eval().requires_grad_(False), schedule)


def _part(kind: Any, source: str | Path, name: str, **options: Any) -> Any:
    """A part of a pipeline, from the folder of its name or the top level."""
    if Path(source).is_dir():
        inside = {"subfolder": name} if (Path(source) / name).is_dir() else {}
        return kind.from_pretrained(source, local_files_only=True, **inside, **options)
    try:
        return kind.from_pretrained(source, subfolder=name, **options)
    except OSError:
        return kind.from_pretrained(source, **options)
