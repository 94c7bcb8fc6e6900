"""One training loop for all flows, on one process or many.

All randomness is a function of (seed, step), drawn for the global batch, of which each process takes its share: the
number of processes does not change it, and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.files import checksum, remove_leftovers, write_errors
from jacobiflow.core.hardware import has_bfloat16
from jacobiflow.core.pictures import save_images
from jacobiflow.core.processes import Lock, StopKey, World, peers
from jacobiflow.core.progress import note
from jacobiflow.data.decoding import Images
from jacobiflow.data.transforms import Batch, prepare, wrong_labels
from jacobiflow.flows.checkpoint import document
from jacobiflow.flows.flow import Flow, standard_normal
from jacobiflow.training.log import Log
from jacobiflow.training.recipe import Recipe, TrainingConfig
from jacobiflow.training.state import CONTENT, State, TrainingError

# Settings that may change when a run resumes: they decide what is written or how a step is computed.
MAY_CHANGE = {"source", "log_every", "save_every", "keep_every", "sample_every", "validate"}
MAY_CHANGE |= {"tensorboard", "accumulate", "compile", "bf16"}
STEPS = 100  # of an epoch, where there is no data to pass over
Draws = range  # noise in place of data: so many draws are an epoch


def learning_rate(step: int, steps_per_epoch: float, total: int, config: TrainingConfig) -> float:
    """Linear warm-up to lr, then a cosine from lr to final_lr."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.lr * min((step + 1) / warmup, 1.0)
    done = (step - warmup) / max(total - warmup, 1)
    half = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.final_lr + (config.lr - config.final_lr) * half


def decay_of_average(step: int, ema: float) -> float:
    """The decay of the averaged weights after `step` steps: small at first, so that initial weights are forgotten.

    >>> [round(decay_of_average(step, 0.999), 3) for step in (0, 90, 10_000)]
    [0.1, 0.91, 0.999]
    """
    return min(ema, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: nn.Module, module: nn.Module, decay: float) -> None:
    """Move averaged weights towards those of `module`; buffers are not averaged."""
    for mean, weight in zip(average.parameters(), module.parameters(), strict=True):
        mean.lerp_(weight, 1 - decay)
    for mine, its in zip(average.buffers(), module.buffers(), strict=True):
        mine.copy_(its)


def batches(count: int, size: int, seed: int, step: int) -> Iterator[Tensor]:
    """Indices of batch `step`, `step` + 1, ... Each epoch is one shuffle; its incomplete batch is dropped."""
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
    """Trains one flow by a recipe. `result` is the flow that is validated, sampled and saved at the end."""

    def __init__(
        self, recipe: Recipe, flow: Flow, train: Images | Draws, validation: Images | Draws, out: Path, world: World
    ) -> None:
        config = recipe.training
        self.recipe, self.config, self.flow, self.out = recipe, config, flow, out
        self.train, self.validation, self.world = train, validation, world
        if config.batch_size % (world.size * config.accumulate):
            parts = f"{world.size} processes x {config.accumulate} accumulation steps"
            raise TrainingError(f"training.batch_size {config.batch_size} does not divide among {parts}")
        if len(train) < config.batch_size:
            raise TrainingError(f"{len(train)} training images are fewer than training.batch_size {config.batch_size}")
        self.device = next(flow.parameters()).device
        fast = has_bfloat16(self.device)
        self.bf16 = self.device.type == "cuda" and fast if config.bf16 is None else config.bf16
        if self.bf16 and not fast:
            raise TrainingError("training.bf16: this processor has no bfloat16 instructions: leave it out")
        self.per_epoch = len(train) // config.batch_size
        self.total = max(1, round(config.epochs * self.per_epoch))
        options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.AdamW(flow.parameters(), **options)
        self.average: Flow | None = deepcopy(flow) if config.ema else None
        self.result = self.average or flow
        self.means: Tensor | None = None  # the mean image of each class, if labels are contrasted
        if config.contrast:
            if flow.num_classes < 2 or not isinstance(train, Images) or train.labels is None:
                raise TrainingError("training.contrast needs a model and data with two or more classes: leave it out")
            every = (train.pixels[train.labels == k].flatten(1).float().mean(0) for k in range(flow.num_classes))
            self.means = (torch.stack(list(every)) / 127.5 - 1).nan_to_num(1e3)  # far from all if it has no image
        loss: Any = Loss(flow, config.tol, config.contrast)
        if config.compile:
            loss = torch.compile(loss)
        if world.size > 1:
            names = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # they differ between versions
            sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
            options = {sync: False}  # buffers are equal everywhere
            loss = nn.parallel.DistributedDataParallel(loss, **options)
        self.loss: nn.Module = loss
        more = {"total": self.total, "flow": document(flow)}
        self.state = State(out, self._settings(), flow, self.optimizer, self.average, more)

    def _settings(self) -> dict[str, Any]:
        """The settings and the training images that a resumed run must share, as one flat table."""
        content: dict[str, Any] = {"training images": len(self.train)}
        if isinstance(self.train, Images):
            labels = {} if self.train.labels is None else {"labels": self.train.labels}
            content[CONTENT] = checksum({"pixels": self.train.pixels} | labels)
        if content != self.world.share(lambda: content):
            raise TrainingError("this process has read other images than the first: give all the same data")
        doc = json.loads(json.dumps(self.recipe.to_dict()))
        for table in ("model", "data", "training"):
            content |= {f"{table}.{name}": value for name, value in doc[table].items() if name not in MAY_CHANGE}
        return content | {"bfloat16": self.bf16}

    def run(self) -> None:
        """Train to the last step. Resumes from the state in `out` if there is one."""
        config, world = self.config, self.world
        with ExitStack() as stack:
            world.share(lambda: self._lock(stack))
            step = self.state.load()
            if step and world.leader:
                note(f"finished at step {step:,}" if step == self.total else f"resuming from step {step:,}")
            order = batches(len(self.train), config.batch_size, config.seed, step)
            log = Log(self.out, step, self.total, tensorboard=config.tensorboard) if world.leader else None
            with log or nullcontext(), StopKey() as stop, peers():
                while step < self.total and not world.any(stop.pressed):
                    loss, norm = self.step(step, next(order))
                    step += 1
                    if log is not None:
                        log.advance(config.batch_size, loss)
                        with write_errors(self.out):
                            self.write(step, loss, norm, log)
                if step < self.total and world.leader:
                    with write_errors(self.out):
                        self.state.save(step)
            world.any(False)  # torchrun ends all processes when one fails: wait until the state is written
        if step < self.total and world.leader:
            raise TrainingError(f"stopped after step {step}: run the same command again to resume")

    def _lock(self, stack: ExitStack) -> None:
        """Lock the folder until `stack` closes: two runs would overwrite each other's state."""
        with write_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(Lock(self.out)).exclusive()
            for place in (self.out, *self.out.rglob("*/")):
                remove_leftovers(place)

    def step(self, step: int, index: Tensor) -> tuple[float, float]:
        """One optimizer step on the global batch `index`. Returns its mean loss and gradient norm."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.per_epoch, self.total, config)
        batch = self.batch(self.train, index, generator(config.seed, step, 1), augment=True)
        try:
            loss, z_squared = self.backward(batch)
        except torch.OutOfMemoryError:
            raise TrainingError("out of memory: raise training.accumulate or lower the batch size") from None
        norm = float(nn.utils.clip_grad_norm_(self.flow.parameters(), config.clip or math.inf))
        if not math.isfinite(loss) or not math.isfinite(norm):
            wrong = f"the loss is {loss:.6g} and the norm of its gradient {norm:.6g} at step {step}"
            raise TrainingError(f"{wrong}: lower training.lr or set training.clip, in a new --out")
        self.optimizer.step()
        var = self.flow.prior_var() if getattr(self.flow.config, "volume_preserving", False) else None
        if var is not None:  # learned as a running mean of z^2, which is in units of the present variance
            var.lerp_(var * self.world.mean(z_squared), 0.1)
        if self.average is not None:
            update_average(self.average, self.flow, decay_of_average(step, config.ema))
        return loss, norm

    def backward(self, batch: Batch) -> tuple[float, Tensor]:
        """Gradients of the mean loss. Returns that loss, and the mean of z^2 over this process's share.

        Each process takes its share of the global batch, in `accumulate` parts.
        """
        world, parts = self.world, self.config.accumulate
        rows = len(batch.x) // (world.size * parts)
        total, z_squared = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(parts):
            first = (world.rank * parts + i) * rows
            given = (None if t is None else t[first : first + rows].to(self.device) for t in batch)
            wait = world.size > 1 and i < parts - 1  # gradients are summed over processes in the last part
            with self.loss.no_sync() if wait else nullcontext():  # type: ignore[operator]
                with self._autocast():
                    loss, squares = self.loss(*given)
                (loss / parts).backward()
            total, z_squared = total + loss.detach() / parts, z_squared + squares / parts
        return float(world.mean(total)), z_squared

    def batch(self, images: Images | Draws, index: Tensor, draw: torch.Generator, *, augment: bool) -> Batch:
        """The images `index` as the flow takes them; or as many draws of noise."""
        config = self.config
        if isinstance(images, Draws):
            return Batch(torch.randn(len(index), *self.flow.latent_shape, generator=draw), None)
        options: dict[str, Any] = {"noise": config.noise, "noise_std": self.flow.noise_std}
        if augment:
            options |= {"flip": config.flip, "label_drop": config.label_drop}
        batch = prepare(images, index, draw, **options)
        labels, wrong = batch.labels if self.flow.num_classes else None, None
        if augment and self.means is not None and images.labels is not None:
            wrong = wrong_labels(batch.x, images.labels[index], self.means, draw)
        return Batch(batch.x.reshape(len(index), *self.flow.data_shape), labels, wrong)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def write(self, step: int, loss: float, norm: float, log: Log) -> None:
        """Log, validate, sample and save, each when due. The state comes last: whoever is killed before repeats it."""
        config, end, values = self.config, step == self.total, dict[str, float]()
        if end or step % config.log_every == 0:
            lr = self.optimizer.param_groups[0]["lr"]
            values |= {"loss": loss, "norm": norm, "lr": lr, "rate": log.rate()}
        if config.validate and len(self.validation) and (end or step % self.per_epoch == 0):
            values["validation"] = self.evaluate()
        log.write(step=step, epoch=step / self.per_epoch, **values)
        if config.sample_every and (end or step % config.sample_every == 0):
            self.picture(step)
        if config.keep_every and step % config.keep_every == 0:
            self.result.save(self.out / "kept" / f"step-{step:07d}")
        if end:
            self.result.save(self.out / "model")
        if end or step % config.save_every == 0:
            self.state.save(step)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on evenly spaced validation images, always with the same noise."""
        count = min(self.config.validate, len(self.validation))
        chosen = torch.linspace(0, len(self.validation) - 1, count).long()  # sources may be sorted
        draw, loss = generator(self.config.seed, 0, 2), Loss(self.result, self.config.tol)
        total = 0.0
        for index in torch.split(chosen, 250):
            batch = self.batch(self.validation, index, draw, augment=False)
            given = (None if t is None else t.to(self.device) for t in batch)
            total += float(loss(*given)[0]) * len(index)
        return total / count

    def picture(self, step: int) -> None:
        """A grid of samples, made with the fast decoder."""
        columns = min(self.flow.num_classes, 10) or 8
        labels = torch.arange(8 * columns) % columns if self.flow.num_classes else None
        out = self.result.sample(8 * columns, labels=labels, plan="selective", seed=self.config.seed)
        x = self.result.as_shown(out.x)
        if x.ndim == 2:  # grey squares
            x = x.reshape(len(x), 1, math.isqrt(x.shape[1]), -1)
        path = self.out / "samples" / f"step-{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        save_images(x, path, columns=columns)


class Loss(nn.Module):
    """The flow's `training_loss`, and the contrast of classes, as a module, which torch compiles or distributes."""

    def __init__(self, flow: Flow, tol: float, contrast: float = 0.0) -> None:
        super().__init__()
        self.flow, self.tol, self.contrast = flow, tol, contrast

    def forward(self, x: Tensor, labels: Tensor | None, wrong: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its mean z^2. In half of the batch, each label competes with a wrong one [n]."""
        if wrong is None or labels is None:
            return self.flow.training_loss(x, labels, self.tol)
        n, half = len(x), -(-len(x) // 2)
        enc = self.flow.encode(torch.cat((x, x[:half])), torch.cat((labels, wrong[:half])))
        log_p = standard_normal(enc.z) + enc.log_det
        apart = F.softplus(log_p[n:] - log_p[:half])  # -log(p(x | label) / (p(x | label) + p(x | wrong)))
        loss = -log_p[:n].mean() / math.prod(self.flow.data_shape)
        return loss + self.contrast * torch.where(labels[:half] < 0, 0, apart).mean(), enc.z[
            :n
        ].detach().square().mean(0)
