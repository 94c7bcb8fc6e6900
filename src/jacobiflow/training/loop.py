"""One training loop for all flows, on one process or many.

All randomness is a function of (seed, step): data order, noise, flips and dropped labels are drawn
for the global batch and then cut into shares. So the number of processes does not change them, and
a resumed run draws what an undisturbed one would.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from jacobiflow.core.types import JacobiflowError
from jacobiflow.data.pictures import save_grid
from jacobiflow.data.sources import Images
from jacobiflow.data.transforms import Batch, prepare
from jacobiflow.flows.flow import Flow
from jacobiflow.training.recipe import Recipe, TrainingConfig
from jacobiflow.training.state import StateError, load_state, save_state


class TrainingError(JacobiflowError, RuntimeError):
    """A run that cannot start or go on."""


@dataclass(frozen=True)
class World:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1
    local: int = 0  # which of this machine's

    @classmethod
    def from_environment(cls) -> World:
        """As torchrun says; joins the process group if there is more than one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))


def learning_rate(step: int, steps_per_epoch: float, total: int, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine from lr to final_lr."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    half = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.final_lr + (config.lr - config.final_lr) * half


def batches(count: int, size: int, seed: int, step: int) -> Iterator[Tensor]:
    """Indices of batch `step`, `step` + 1, ...: each epoch is one shuffle, incomplete batches dropped."""
    per_epoch = count // size
    while True:
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(count, generator=generator(seed, epoch, 0))
        for i in range(place, per_epoch):
            yield order[i * size : (i + 1) * size]
            step += 1


def generator(*key: int) -> torch.Generator:
    """A generator that depends on these numbers only."""
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % (2**31 - 1)
    return torch.Generator().manual_seed(seed)


class Trainer:
    """A recipe, its flow and its data; `run` trains until the recipe's last step."""

    def __init__(self, recipe: Recipe, flow: Flow, train: Images, validation: Images, out: Path) -> None:
        config = recipe.training
        self.recipe, self.config, self.flow, self.out = recipe, config, flow, out
        self.train, self.validation = train, validation
        self.world = World.from_environment()
        shares = self.world.size * config.accumulate
        if config.batch_size % shares:
            raise TrainingError(
                f"training.batch_size {config.batch_size} does not divide among "
                f"{self.world.size} processes x {config.accumulate} accumulation steps"
            )
        if len(train) < config.batch_size:
            raise TrainingError(
                f"{len(train)} training images are fewer than training.batch_size {config.batch_size}"
            )
        self.device = next(flow.parameters()).device
        self.per_epoch = len(train) // config.batch_size
        self.total = max(1, round(config.epochs * self.per_epoch))
        self.optimizer = torch.optim.AdamW(
            flow.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.ema = {n: p.detach().clone() for n, p in flow.named_parameters()} if config.ema else None
        self.loss = self._loss_module()

    def _loss_module(self) -> nn.Module:
        loss: nn.Module = _Loss(self.flow)
        if self.config.compile:
            loss = torch.compile(loss)  # type: ignore[assignment]
        if self.world.size > 1:
            loss = nn.parallel.DistributedDataParallel(loss)
        return loss

    @property
    def leader(self) -> bool:
        """Whether this process writes files."""
        return self.world.rank == 0

    def resume(self) -> int:
        """The step to go on from; 0 for a new run."""
        self.out.mkdir(parents=True, exist_ok=True)
        about = load_state(self.out, self.flow, self.optimizer, self.ema)
        if about is None:
            return 0
        mine, found = self._identity(), about["recipe"]
        changed = [k for k in mine if k in found and mine[k] != found[k]]
        if changed:
            raise StateError(
                f"{self.out} holds a run with other settings ({', '.join(changed)}); use a new --out"
            )
        return int(about["step"])

    def _identity(self) -> dict[str, Any]:
        """The settings that a resumed run must share, flattened."""
        free = {"log_every", "save_every", "keep_every", "sample_every", "validate", "tensorboard"}
        doc = json.loads(json.dumps(self.recipe.to_dict()))
        flat = {f"{t}.{k}": v for t in ("model", "data", "training") for k, v in doc[t].items()}
        return {k: v for k, v in flat.items() if k.partition(".")[2] not in free and k != "data.source"}

    def run(self) -> None:
        """Train to the end, going on from the last checkpoint in `out` if there is one."""
        step = self.resume()
        log = _Log(self.out, self.config.tensorboard, step) if self.leader else None
        bar = tqdm(
            total=self.total,
            initial=step,
            unit="step",
            disable=not (self.leader and sys.stderr.isatty()),
        )
        order = batches(len(self.train), self.config.batch_size, self.config.seed, step)
        began, seen = time.perf_counter(), 0
        self.flow.train()
        with bar, _StopKey() as stop:
            while step < self.total and not stop.pressed:
                loss, norm = self.step(step, next(order))
                step += 1
                seen += self.config.batch_size
                bar.update()
                if step % self.config.log_every == 0 or step == self.total:
                    rate = seen / (time.perf_counter() - began)
                    began, seen = time.perf_counter(), 0
                    bar.set_postfix(loss=f"{loss:.4f}", images_s=f"{rate:.0f}")
                    if log:
                        lr = self.optimizer.param_groups[0]["lr"]
                        epoch = step / self.per_epoch
                        log.write(step=step, epoch=epoch, loss=loss, norm=norm, lr=lr, rate=rate)
                if self.leader:
                    self.write(step, log)
        if stop.pressed and step < self.total:
            if self.leader:
                self.save(step)
            raise TrainingError(f"stopped after step {step}; the same command goes on from there")
        if self.world.size > 1:
            dist.barrier()

    def step(self, step: int, index: Tensor) -> tuple[float, float]:
        """One optimiser step on the global batch `index`; returns its mean loss and gradient norm."""
        config, world = self.config, self.world
        lr = learning_rate(step, self.per_epoch, self.total, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.batch(self.train, index, generator(config.seed, step, 1), augment=True)
        share = len(index) // (world.size * config.accumulate)
        total = torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(config.accumulate):
            lo = (world.rank * config.accumulate + i) * share
            part = batch[lo : lo + share]
            last = i == config.accumulate - 1
            hold = nullcontext() if last or world.size == 1 else self.loss.no_sync()  # type: ignore[operator]
            with hold, self._autocast():
                loss = self.loss(part.x, part.labels) / config.accumulate
                loss.backward()
            total += loss.detach()
        if world.size > 1:
            dist.all_reduce(total)
            total /= world.size
        clip = config.clip or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.flow.parameters(), clip))
        value = float(total)
        if not math.isfinite(value) or not math.isfinite(norm):
            raise TrainingError(f"the loss is {value} at step {step}; lower training.lr or set training.clip")
        self.optimizer.step()
        self.track_prior(batch)
        if self.ema is not None:
            for name, p in self.flow.named_parameters():
                self.ema[name].lerp_(p.detach(), 1 - config.ema)
        return value, norm

    def batch(self, images: Images, index: Tensor, draw: torch.Generator, *, augment: bool) -> Batch:
        """Images number `index` as the flow takes them."""
        config = self.config
        found = prepare(
            images,
            index,
            draw,
            noise=config.noise,
            noise_std=getattr(self.flow.config, "noise_std", 0.0),
            flip=augment and config.flip,
            label_drop=config.label_drop if augment else 0.0,
        )
        labels = found.labels if self.flow.num_classes else None
        return Batch(found.x.reshape(len(index), *self.flow.data_shape), labels).to(self.device)

    def track_prior(self, batch: Batch) -> None:
        """The volume-preserving variant learns the prior's variance as a running mean of z^2."""
        if not getattr(self.flow.config, "volume_preserving", False):
            return
        with torch.no_grad():
            var = self.flow.prior_var()
            assert var is not None
            z = self.flow.encode(batch.x, batch.labels).z * var.sqrt()
            var.lerp_(z.square().mean(0), 0.1)

    def _autocast(self) -> Any:
        cuda = self.device.type == "cuda" and self.config.bf16
        return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def write(self, step: int, log: _Log | None) -> None:
        """Whatever is due after `step` steps: validation, sample grid, kept weights, checkpoint."""
        config, end = self.config, step == self.total
        due = {
            name: end or bool(every and step % every == 0)
            for name, every in (("save", config.save_every), ("sample", config.sample_every))
        }
        if log and config.validate and len(self.validation) and (end or step % self.per_epoch == 0):
            log.write(step=step, epoch=step / self.per_epoch, validation=self.evaluate())
        if config.sample_every and due["sample"]:
            self.picture(step)
        if config.keep_every and step % config.keep_every == 0:
            self.export(self.out / "kept" / f"step-{step:07d}")
        if due["save"]:
            self.save(step)
        if end:
            self.export(self.out / "model")

    def save(self, step: int) -> None:
        """The state of the run after `step` steps."""
        about = {"step": step, "recipe": self._identity()}
        save_state(self.out, self.flow, self.optimizer, self.ema, about)

    def averaged(self) -> dict[str, Tensor]:
        """The weights to use: averaged if the recipe says so."""
        return self.flow.state_dict() | (self.ema or {})

    def export(self, folder: Path) -> None:
        """The flow as a checkpoint folder."""
        flow = type(self.flow)(self.flow.config)
        flow.load_state_dict(self.averaged())
        flow.save(folder)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on evenly spaced validation images, always with the same noise."""
        self.flow.eval()
        count = min(self.config.validate, len(self.validation))
        chosen = torch.linspace(0, len(self.validation) - 1, count).long()  # sources may be sorted
        draw = generator(self.config.seed, 0, 2)
        total = 0.0
        for lo in range(0, count, 250):
            index = chosen[lo : lo + 250]
            batch = self.batch(self.validation, index, draw, augment=False)
            total += float(-self.flow.log_prob(batch.x, batch.labels).double().sum())
        self.flow.train()
        return total / count / math.prod(self.flow.data_shape)

    def picture(self, step: int) -> None:
        """A grid of samples, made with the fast decoder."""
        self.flow.eval()
        columns = min(self.flow.num_classes, 10) or 8
        labels = torch.arange(8 * columns) % columns if self.flow.num_classes else None
        x = self.flow.sample(8 * columns, labels=labels, seed=self.config.seed).x
        x = x.reshape(-1, *self.train.pixels.shape[1:])
        folder = self.out / "samples"
        folder.mkdir(exist_ok=True)
        save_grid(x, folder / f"step-{step:07d}.png", columns=columns)
        self.flow.train()


class _Loss(nn.Module):
    """Mean negative log-likelihood in nats a dimension."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        dims = math.prod(self.flow.data_shape)
        return -self.flow.log_prob(x, labels).mean() / dims


class _StopKey:
    """Remembers a Ctrl-C, so that a run ends between two steps; the second one ends it at once."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> _StopKey:
        self.before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.press)
        return self

    def press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.before)


class _Log:
    """log.jsonl, one object a line; a resumed run drops the lines that it will write again."""

    def __init__(self, folder: Path, tensorboard: bool, step: int) -> None:
        self.path = folder / "log.jsonl"
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue
        self.path.write_text("".join(kept), encoding="utf-8")
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise TrainingError("TensorBoard is not installed: pip install tensorboard") from None
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, **entry: float) -> None:
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")
        if self.board is not None:
            for name, value in entry.items():
                if name not in ("step", "epoch"):
                    self.board.add_scalar(name, value, int(entry["step"]))
        if not sys.stderr.isatty():
            shown = " ".join(f"{k}={v:.6g}" for k, v in entry.items())
            print(shown, file=sys.stderr, flush=True)
