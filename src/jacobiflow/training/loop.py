"""One training loop for all flows, on one process or many.

All randomness is a function of (seed, step): data order, noise, flips and dropped labels are drawn
for the global batch and then cut into shares. So the number of processes does not change them, and
a resumed run draws what an undisturbed one would.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.core.files import checksum
from jacobiflow.core.locks import Lock
from jacobiflow.core.processes import StopKey, World
from jacobiflow.core.types import JacobiflowError
from jacobiflow.data.ising import Ising
from jacobiflow.data.pictures import save_grid
from jacobiflow.data.sources import Images
from jacobiflow.data.transforms import Batch, prepare
from jacobiflow.flows.flow import Flow, standard_normal
from jacobiflow.training.log import Log
from jacobiflow.training.recipe import Recipe, TrainingConfig
from jacobiflow.training.state import CONTENT, load_state, save_state

# What may change when a run goes on: it decides what is written, or how a step is computed, not what it is.
FREE = {
    "data.source",
    *(f"training.{name}" for name in ("log_every", "save_every", "keep_every", "sample_every", "validate")),
    *(f"training.{name}" for name in ("tensorboard", "accumulate", "compile")),
}


STEPS = 100  # of an epoch, where there is no data to pass over


class TrainingError(JacobiflowError):
    """A run that cannot start or go on."""


def learning_rate(step: int, steps_per_epoch: float, total: int, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine from lr to final_lr."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.lr * min((step + 1) / warmup, 1.0)
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

    def __init__(
        self,
        recipe: Recipe,
        flow: Flow,
        train: Images | Draws,
        validation: Images | Draws,
        out: Path,
        world: World,
    ) -> None:
        config = recipe.training
        self.recipe, self.config, self.flow, self.out = recipe, config, flow, out
        self.train, self.validation, self.world = train, validation, world
        if config.batch_size % (world.size * config.accumulate):
            raise TrainingError(
                f"training.batch_size {config.batch_size} does not divide among "
                f"{world.size} processes x {config.accumulate} accumulation steps"
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
        self.average = copy.deepcopy(flow) if config.ema else None
        self.loss = self._loss_module()
        self.content = self._content()

    def _content(self) -> dict[str, Any]:
        """What names the training images, the same for all processes: a run goes on with its own only."""
        found: dict[str, Any] = {"training images": len(self.train)}
        if isinstance(self.train, Images):
            parts = {"pixels": self.train.pixels}
            parts |= {} if self.train.labels is None else {"labels": self.train.labels}
            found[CONTENT] = checksum(parts)
        if found != self.world.share(lambda: found):
            raise TrainingError("this process has read other images than the first: give all the same data")
        return found

    def _loss_module(self) -> nn.Module:
        loss: nn.Module = _loss(self.flow, self.recipe)
        if self.config.compile:
            loss = torch.compile(loss)  # type: ignore[assignment]
        if self.world.size > 1:
            loss = nn.parallel.DistributedDataParallel(loss, **_no_buffers())
        return loss

    @property
    def result(self) -> Flow:
        """The flow that is validated, shown and exported: with averaged weights if there are any."""
        return self.flow if self.average is None else self.average

    def resume(self) -> int:
        """The step to go on from; 0 for a new run."""
        return load_state(self.out, self._settings(), self.flow, self.optimizer, self.average)

    def save(self, step: int) -> None:
        """The state of the run after `step` steps."""
        save_state(self.out, step, self._settings(), self.flow, self.optimizer, self.average)

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must share, flattened."""
        doc = json.loads(json.dumps(self.recipe.to_dict()))
        tables = ("model", "data", "training", *(("target",) if self.recipe.target else ()))
        flat = {f"{t}.{k}": v for t in tables for k, v in doc[t].items()}
        return self.content | {k: v for k, v in flat.items() if k not in FREE}

    def run(self) -> None:
        """Train to the end, going on from the last checkpoint in `out` if there is one."""
        with ExitStack() as held:
            self.world.share(lambda: self._claim(held))
            self._run()

    def _claim(self, held: ExitStack) -> None:
        """The folder is ours until `held` ends: two trainings would overwrite each other's state."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            held.enter_context(Lock(self.out)).alone()
        except OSError as error:
            raise TrainingError(f"--out {self.out} cannot be written to: {error.strerror}") from None

    def _run(self) -> None:
        step = self.resume()
        order = batches(len(self.train), self.config.batch_size, self.config.seed, step)
        began, seen = time.perf_counter(), 0
        with self._log(step) as log, StopKey() as stop:
            while step < self.total and not self.world.any(stop.pressed):
                loss, norm = self.step(step, next(order))
                step += 1
                seen += self.config.batch_size
                if log is None:
                    continue
                log.advance()
                if step % self.config.log_every == 0 or step == self.total:
                    rate = seen / (time.perf_counter() - began)
                    began, seen = time.perf_counter(), 0
                    lr, epoch = self.optimizer.param_groups[0]["lr"], step / self.per_epoch
                    log.write(step=step, epoch=epoch, loss=loss, norm=norm, lr=lr, rate=rate)
                self.write(step, log)
            if step < self.total and self.world.leader:
                self.save(step)
        self.world.any(False)  # torchrun ends all processes as soon as one fails: wait for what is written
        if step < self.total and self.world.leader:
            raise TrainingError(f"stopped after step {step}; the same command goes on from there")

    def _log(self, step: int) -> Any:
        if not self.world.leader:
            return nullcontext()
        return Log(self.out, step=step, total=self.total, tensorboard=self.config.tensorboard)

    def step(self, step: int, index: Tensor) -> tuple[float, float]:
        """One optimiser step on the global batch `index`; returns its mean loss and gradient norm."""
        config = self.config
        lr = learning_rate(step, self.per_epoch, self.total, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.batch(self.train, index, generator(config.seed, step, 1), augment=True)
        try:
            loss, spread = self.gradients(batch)
        except torch.OutOfMemoryError:
            raise TrainingError("out of memory: raise training.accumulate or lower the batch size") from None
        norm = float(nn.utils.clip_grad_norm_(self.flow.parameters(), config.clip or math.inf))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                f"the loss is {loss:.6g} and the norm of its gradient {norm:.6g} at step {step}: "
                "lower training.lr or set training.clip, in a new --out"
            )
        self.optimizer.step()
        if getattr(self.flow.config, "volume_preserving", False):
            self.track_prior(spread)
        if self.average is not None:
            self.track_average(self.average)
        return loss, norm

    def gradients(self, batch: Batch) -> tuple[float, Tensor]:
        """Leaves the gradient of the mean loss in the weights; returns that loss and the mean of z^2.

        This process goes through its share of the global batch, in as many parts as the recipe accumulates.
        """
        world, parts = self.world, self.config.accumulate
        rows = len(batch) // (world.size * parts)
        total, spread = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(parts):
            first = (world.rank * parts + i) * rows
            part = batch[first : first + rows].to(self.device)
            last = i == parts - 1
            hold = nullcontext() if last or world.size == 1 else self.loss.no_sync()  # type: ignore[operator]
            with hold:
                with self._autocast():
                    loss, squares = self.loss(part.x, part.labels)
                (loss / parts).backward()
            total, spread = total + loss.detach() / parts, spread + squares / parts
        return float(world.mean(total)), spread

    def batch(self, images: Images | Draws, index: Tensor, draw: torch.Generator, *, augment: bool) -> Batch:
        """Images number `index` as the flow takes them; or as many draws of noise."""
        config = self.config
        if isinstance(images, Draws):
            return Batch(torch.randn(len(index), *self.flow.latent_shape, generator=draw), None)
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
        return Batch(found.x.reshape(len(index), *self.flow.data_shape), labels)

    @torch.no_grad()
    def track_prior(self, spread: Tensor) -> None:
        """The volume-preserving variant learns the prior's variance: a running mean of z^2, z not yet
        divided by it; `spread` is this process's mean of z^2 in units of that variance.
        """
        var = self.flow.prior_var()
        assert var is not None
        var.lerp_(var * self.world.mean(spread), 0.1)

    @torch.no_grad()
    def track_average(self, average: Flow) -> None:
        """The running mean of the weights; the prior's variance is one already."""
        for mine, p in zip(average.parameters(), self.flow.parameters(), strict=True):
            mine.lerp_(p, 1 - self.config.ema)
        for buffer, b in zip(average.buffers(), self.flow.buffers(), strict=True):
            buffer.copy_(b)

    def _autocast(self) -> Any:
        cuda = self.device.type == "cuda" and self.config.bf16
        return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def write(self, step: int, log: Log) -> None:
        """Whatever is due after `step` steps. The state comes last: a run that is killed before it is
        written goes on from the one before, and does the rest again.
        """
        config, end = self.config, step == self.total
        if config.validate and len(self.validation) and (end or step % self.per_epoch == 0):
            log.write(step=step, epoch=step / self.per_epoch, validation=self.evaluate())
        if config.sample_every and (end or step % config.sample_every == 0):
            self.picture(step)
        if config.keep_every and step % config.keep_every == 0:
            self.result.save(self.out / "kept" / f"step-{step:07d}")
        if end:
            self.result.save(self.out / "model")
        if end or step % config.save_every == 0:
            self.save(step)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on evenly spaced validation images, always with the same noise."""
        count = min(self.config.validate, len(self.validation))
        chosen = torch.linspace(0, len(self.validation) - 1, count).long()  # sources may be sorted
        draw, loss = generator(self.config.seed, 0, 2), _loss(self.result, self.recipe)
        total = 0.0
        for index in torch.split(chosen, 250):
            batch = self.batch(self.validation, index, draw, augment=False).to(self.device)
            total += float(loss(batch.x, batch.labels)[0]) * len(index)
        return total / count

    def picture(self, step: int) -> None:
        """A grid of samples, made with the fast decoder."""
        columns = min(self.flow.num_classes, 10) or 8
        labels = torch.arange(8 * columns) % columns if self.flow.num_classes else None
        x = self.result.sample(8 * columns, labels=labels, seed=self.config.seed).x
        target = self.recipe.target
        shape = (1, target.side, target.side) if target else self.train.pixels.shape[1:]  # type: ignore[union-attr]
        x = x.tanh() if target else x  # the mean of a spin, given its field
        x = x.reshape(-1, *shape)
        folder = self.out / "samples"
        folder.mkdir(exist_ok=True)
        save_grid(x, folder / f"step-{step:07d}.png", columns=columns)


@dataclass(frozen=True)
class Draws:
    """Noise in place of data: `count` draws are an epoch."""

    count: int

    def __len__(self) -> int:
        return self.count


class Likelihood(nn.Module):
    """Mean negative log-likelihood in nats a dimension, and the mean of z^2 over the batch."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        dims = math.prod(self.flow.data_shape)
        enc = self.flow.encode(x, labels)
        loss = -(standard_normal(enc.z) + enc.log_det).mean() / dims
        return loss, enc.z.detach().square().mean(0)


class ReverseKL(nn.Module):
    """Mean of log q(x) - log p(x) over samples x of noise z, in nats a dimension; p need not be normalised.

    Its gradient is that along the samples alone, by the implicit function theorem: the rest of the full one,
    the mean of d log q(x) / d weights at fixed x, is zero and only adds noise.
    """

    def __init__(self, flow: Flow, target: Ising, tol: float) -> None:
        super().__init__()
        self.flow, self.target, self.tol = flow, target, tol

    def forward(self, z: Tensor, labels: None) -> tuple[Tensor, Tensor]:
        x = self.flow.decode(z, tol=self.tol, differentiable=True).x
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            gap = self.flow.log_prob(at) - self.target.log_density(at)
            (slope,) = torch.autograd.grad(gap.sum(), at)
        loss, along = gap.detach().mean(), (x * slope).sum() / len(z)
        return (loss + along - along.detach()) / math.prod(self.flow.data_shape), z.square().mean(0)


def _loss(flow: Flow, recipe: Recipe) -> nn.Module:
    return Likelihood(flow) if recipe.target is None else ReverseKL(flow, recipe.target, recipe.training.tol)


def _no_buffers() -> dict[str, Any]:
    """The option, by its name in this torch, that leaves buffers alone: they are the same everywhere."""
    names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
