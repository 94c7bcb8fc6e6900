"""Flow: a stack of autoregressive blocks between data and standard normal noise."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from jacobiflow.core import arguments, results
from jacobiflow.core.arguments import Labels
from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Block, Conditioner
from jacobiflow.core.decode import decode
from jacobiflow.core.hardware import require_memory
from jacobiflow.core.implicit import attach
from jacobiflow.core.method import INITS, Init, Method, Plan, Unit
from jacobiflow.core.pictures import as_images
from jacobiflow.core.progress import progress_bar
from jacobiflow.core.results import BlockStats, Decoded, Encoded, JacobiflowError, OnFailure, Stats, Watcher, joined
from jacobiflow.core.rows import row_noise
from jacobiflow.flows.calibration import Calibration
from jacobiflow.flows.checks import PROBES, checked, warn_if_loose, warn_of_nonfinite
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.plans import SWEPT, resolve_plan
from jacobiflow.flows.profile import Profile
from jacobiflow.flows.weights import Group, MemoModule, WeightMemo, check_size, digest, tensors_of
from jacobiflow.kernels.backend import Backend, bind
from jacobiflow.kernels.threads import torch_single_threaded

GRADIENT_TOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
Measured = TypeVar("Measured", Calibration, Profile)


class NonfiniteError(JacobiflowError, ValueError):
    """Weights or context that are not finite."""


class Flow(nn.Module, ABC):
    """x <-> z through `blocks`, stored in density order: blocks[0] is next to the data.

    Stats and plans go in sampling order: their first block is next to the noise.
    """

    family: ClassVar[str]
    config_type: ClassVar[type[Any]]
    default_tol: ClassVar[float]
    default_unit: ClassVar[Unit]  # of methods that have none
    default_deviation: ClassVar[float] = 1e-4  # from exact, that plan="auto" may cost
    trains_on_noise: ClassVar[bool] = False  # `training_loss` takes noise; there is no training data
    config: Any
    data_shape: tuple[int, ...]  # of one x
    latent_shape: tuple[int, ...]  # of one z
    blocks: nn.ModuleList
    num_classes: int = 0  # how many labels the flow knows; 0: it takes none
    class_names: tuple[str, ...] = ()  # () if they are not known
    noise_std: float = 0.0  # of the Gaussian noise of training, which `denoise` removes
    context_features: int = 0  # how many numbers of context a row needs; 0: it takes none
    revision: str | None = None  # the commit of the hub that this flow was loaded from
    calibration: Calibration | None = None  # first guesses, bound to the weights that they were fitted for
    profile: Profile | None = None  # how fast sweeps converge, bound to weights too

    def __init__(self, config: Any) -> None:
        arguments.instance(self.config_type, config)
        check_size(config.shapes())
        super().__init__()
        self.config = config
        self._memo = WeightMemo()
        self.auto_plans: dict[Any, Plan] = {}  # what "auto" chose, by setting
        self._probed: set[Any] = set()  # settings with a tol by hand whose residual was looked at

    @abstractmethod
    def to_sequence(self, x: Tensor) -> Tensor:
        """Data [N, *data_shape] as sequences [N, T, D]."""

    @abstractmethod
    def from_sequence(self, x: Tensor) -> Tensor:
        """Sequences [N, T, D] as data."""

    @abstractmethod
    def bind(self, k: int, n: int, condition: Tensor | None, guidance: Guidance) -> tuple[Conditioner, Bijector]:
        """The conditioner of block k for n rows, with all that is bound to them, and its elementwise map."""

    def order(self, k: int) -> Tensor | None:
        """The order in which block k takes the positions, a buffer; None is as they come."""
        return self._buffers[f"order{k}"]

    def data_log_det(self) -> Tensor | float:
        """log |dx/dseq| of `from_sequence`, the same for every sample."""
        return 0.0

    def prior_var(self) -> Tensor | None:
        """Variance of the latent before it is standardised, [T, D], the buffer `var`; None is 1."""
        return self._buffers.get("var")

    def selective(self, tol: float, init: Init | None) -> Plan:
        """The family's own rule of what to sweep."""
        return Plan.selective(len(self.blocks), tol=tol, init=init)

    def training_loss(self, x: Tensor, labels: Tensor | None, tol: float) -> tuple[Tensor, Tensor]:
        """The loss of a batch in nats per dimension, and its mean z^2. tol: of sweeps, for a loss that decodes."""
        enc = self.encode(x, labels)
        loss = -(standard_normal(enc.z) + enc.log_det).mean() / math.prod(self.data_shape)
        return loss, enc.z.detach().square().mean(0)

    def as_shown(self, x: Tensor) -> Tensor:
        """Samples [N, *data_shape] as pictures show them, in [-1, 1]."""
        return x

    @classmethod
    def adopt(cls, doc: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A config document of version 0.1 as this family writes it. None: it belongs to another family."""
        return None

    def encode(self, x: Tensor, labels: Labels | None = None, *, context: Tensor | None = None) -> Encoded:
        """z, standard normal if x is as the model believes, and log |dz/dx| [N] in nats."""
        arguments.tensor("x", x, next(self.parameters()), self.data_shape)
        seq, log_det = self._encode(self.to_sequence(x), self._condition(len(x), labels, context), Guidance())
        return Encoded(z=seq.reshape(len(x), *self.latent_shape), log_det=log_det)

    def _encode(self, seq: Tensor, condition: Tensor | None, guidance: Guidance) -> tuple[Tensor, Tensor]:
        log_det, var = seq.new_zeros(len(seq)) - self._fixed_log_det(), self.prior_var()
        for k in range(len(self.blocks)):
            block = bind(*self.bind(k, len(seq), condition, guidance), self.order(k), "torch")
            seq, slope = block.forward(seq)
            log_det = log_det + slope
        return seq if var is None else seq * var.rsqrt(), log_det

    def _fixed_log_det(self) -> Tensor | float:
        """log |dx/dz| of all but the blocks."""
        var = self.prior_var()
        return self.data_log_det() + (0.0 if var is None else 0.5 * var.log().sum())

    def log_prob(self, x: Tensor, labels: Labels | None = None, *, context: Tensor | None = None) -> Tensor:
        """log p(x) [N] in nats: log N(z; 0, I) + log |dz/dx|."""
        enc = self.encode(x, labels, context=context)
        return standard_normal(enc.z) + enc.log_det

    def bits_per_dim(self, x: Tensor, labels: Labels | None = None, *, context: Tensor | None = None) -> Tensor:
        """-log2 p(x) / dims(x), [N]. For x = (pixel + u) / 128 - 1, those of pixels of 0 .. 255 are 7 more."""
        return -self.log_prob(x, labels, context=context) / (math.prod(self.data_shape) * math.log(2))

    def noise(
        self, n: int, seed: int | None = None, *, start: int = 0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Standard normal z of samples start .. start + n - 1. With a seed, row i depends on (seed, i) only."""
        n, start = arguments.as_int("n", n), arguments.as_int("start", start)
        if generator is not None:
            arguments.instance(torch.Generator, generator, "generator")
        require_memory(f"noise of {short(n)} samples", 8 * n * math.prod(self.latent_shape), "draw fewer at a time")
        like = next(self.parameters())
        if seed is None:
            place = like.device if generator is None else generator.device
            return torch.randn(n, *self.latent_shape, generator=generator, dtype=like.dtype, device=place).to(like)
        if generator is not None:
            raise TypeError("seed and generator exclude each other: give one of them")
        if start + n > 2**63:
            raise ValueError(f"samples are numbered up to 2^63, not {short(start + n)}")
        rows = row_noise(n, self.latent_shape, arguments.as_int("seed", seed), start)
        return torch.from_numpy(rows).to(dtype=like.dtype, device=like.device)

    def decode(
        self,
        z: Tensor,
        plan: str | Path | Plan | None = None,
        *,
        labels: Labels | None = None,
        context: Tensor | None = None,
        tol: float | None = None,
        init: Init | None = None,
        max_deviation: float | None = None,
        guidance: float | Guidance = 0.0,
        check: bool = False,
        on_failure: OnFailure = "fallback",
        cache: bool = True,
        backend: Backend | None = None,
        differentiable: bool = False,
        watch: Watcher | None = None,
        warn: bool = True,
    ) -> Decoded:
        """x with encode(x).z = z, as exact as the plan asks.

        plan: "auto" (default: the fastest for this machine and batch within `max_deviation`), "sequential" (exact),
            "uniform" (sweeps in every block), "selective" (the family's rule), a Plan, or the path of one. tol and
            init belong to "uniform" and "selective", and mean the latter without a plan. `stats.plan` says what ran.
        max_deviation: the largest |x - exact| that "auto" may cost, as measured by the flow's convergence
            profile. Default: 0.05 for TarFlow; 1e-4 standard deviations for MAF and NSF.
        check: encode the answer and record |encode(x) - z| of each sample in stats.residual. A sample that ended EXACT
            is reported as CONVERGED, with a warning, if its residual exceeds sqrt(eps) * max(1, |z|) anywhere.
        on_failure, cache: see `jacobiflow.core.decode.decode`.
        backend: "torch", "c" or "compile"; None is the first of "c" and "torch" that supports the flow. "compile"
            compiles the network of a TarFlow, once per number of samples and width. `stats.backend` says what ran.
        differentiable: x and log_det carry gradients to z, weights and context (first derivatives, by the implicit
            function theorem). A loose tol biases them, so that named plans then default to a tight one.
        watch: called after every sweep with a `Sweep`, its x in the order of the data, as `from_sequence` takes it.
        warn: give one RuntimeWarning if samples are not finite, and one per setting if the given tol leaves large
            residuals. False is for callers that look at `stats`.
        """
        arguments.tensor("z", z, next(self.parameters()), self.latent_shape)
        for name, value in {"check": check, "cache": cache, "differentiable": differentiable, "warn": warn}.items():
            arguments.switch(name, value)
        used = tol
        if differentiable and tol is None and (plan is None or (isinstance(plan, str) and plan in SWEPT)):
            plan, used = plan or "selective", GRADIENT_TOL[z.dtype]
        guide = Guidance.of(guidance)
        setting: dict[str, Any] = {"context": context, "guidance": guide, "backend": backend}

        def run(_: object) -> Decoded:
            self.refuse_nonfinite()
            condition = self._condition(len(z), labels, context)
            methods = self.plan(plan, tol=used, init=init, max_deviation=max_deviation, n=len(z), **setting)
            began = time.perf_counter()
            with torch.set_grad_enabled(bool(differentiable) and torch.is_grad_enabled()), torch_single_threaded(z):
                blocks = self.bound_blocks(len(z), labels=labels, **setting)
                guide.refuse_idle(labels)
                solve = partial(decode, on_failure=on_failure, cache=cache, watch=watch)
                seq, log_det, stats = self._decode(z, zip(methods, blocks, strict=True), solve)
                x = self.from_sequence(seq)
            seconds, residual = time.perf_counter() - began, None
            if check:
                with torch.no_grad():
                    again, _ = self._encode(seq.detach(), condition, guide)
                stats, residual = checked(stats, z, again.reshape(z.shape))
            found = Stats(blocks=stats, seconds=seconds, residual=residual, plan=methods)
            out = Decoded(x=x, log_det=log_det, stats=found)
            if warn:
                warn_of_nonfinite(x, z, guide)
                self._probe(tol, z, out, condition, guide)
            return out

        if watch is not None:  # it may write to weights, so every block looks at its own
            return run(None)
        return self._memo.solve(self._groups(), self._seen_finite, run)  # reads the weights once, beside its work

    def _decode(
        self, z: Tensor, steps: Iterable[tuple[Method, Block]], solve: Callable[..., Decoded]
    ) -> tuple[Tensor, Tensor, tuple[BlockStats, ...]]:
        seq, log_det, stats = self.to_prior(z), z.new_zeros(len(z)) + self._fixed_log_det(), []
        for i, (method, block) in enumerate(steps):
            out = solve(block, seq, method, number=i)
            x, slope = out.x, out.log_det
            if torch.is_grad_enabled():
                x, slope = attach(block, seq, x, slope, tol=max(method.tol, GRADIENT_TOL[seq.dtype]))
            seq, log_det = x, log_det + slope
            stats.append(out.stats.blocks[0])
        return seq, log_det, tuple(stats)

    def _probe(self, tol: float | None, z: Tensor, out: Decoded, condition: Tensor | None, guide: Guidance) -> None:
        """Look at the residual of a few samples where tol is given by hand, once per setting."""
        setting = (out.stats.plan, guide)
        if not tol or not len(z) or setting in self._probed:
            return
        self._probed.add(setting)
        x = out.x[:PROBES].detach()  # the first batch may have fewer
        z, condition = z[: len(x)].detach(), None if condition is None else condition[: len(x)]
        with torch.no_grad():
            again, _ = self._encode(self.to_sequence(x), condition, guide)
        warn_if_loose(tol, (again.reshape(z.shape) - z).abs())

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Channels, height and width of one x, if it is an image: a vector of a square number is a grey one."""
        images = as_images(torch.empty(1, *self.data_shape))
        return None if images is None else tuple(images.shape[1:])

    @property
    def sequence_shape(self) -> tuple[int, int]:
        """Positions T and numbers per position D."""
        shape = (*self.latent_shape, 1)
        return shape[0], shape[1]

    def to_prior(self, z: Tensor) -> Tensor:
        """Standard noise as the sequence [N, T, D] that the first block decodes."""
        seq, var = z.unsqueeze(-1) if z.ndim == 2 else z, self.prior_var()
        return seq if var is None else seq * var.sqrt()

    def bound_blocks(
        self,
        n: int,
        *,
        labels: Labels | None = None,
        context: Tensor | None = None,
        guidance: Guidance | None = None,
        backend: Backend | None = None,
    ) -> list[Block]:
        """The blocks for n samples, in sampling order."""
        condition, guide = self._condition(n, labels, context), guidance or Guidance()
        ks = reversed(range(len(self.blocks)))
        blocks = [bind(*self.bind(k, n, condition, guide), self.order(k), backend) for k in ks]
        if (guesses := self.guesses()) is None:
            return blocks
        pairs = zip(guesses.mean, guesses.slope, strict=True)
        return [replace(block, guess=pair) for block, pair in zip(blocks, pairs, strict=True)]

    def guesses(self) -> Calibration | None:
        """The calibrated first guesses, if they were fitted for the weights as they are."""
        return self.current(self.calibration, "calibrated first guess")

    def current(self, measured: Measured | None, name: str) -> Measured | None:
        """What was measured, if it was on the weights as they are; else None, and one warning."""
        if measured is None or measured.weights == self.fingerprint():
            return measured
        results.warn_once(f"the {name} of this flow is of other weights and is not used: run tune")
        return None

    @property
    def inits(self) -> tuple[Init, ...]:
        """The first guesses that this flow can begin with, the default first."""
        default = Method().resolved(self.default_unit, calibrated=self.guesses() is not None).init
        assert default is not None
        return (default, *(init for init in INITS if init not in (default, "calibrated")))

    def fingerprint(self) -> str:
        """Identifies weights, and fields of the config that are not at their default; the same for every dtype."""
        known = self.refuse_nonfinite()
        if "fingerprint" not in known:
            tensors = {name: t.float() for name, t in self.state_dict().items()}
            values = ((f, getattr(self.config, f.name)) for f in fields(self.config) if f.compare)
            own = {f.name: value for f, value in values if value != f.default}
            known["fingerprint"] = digest(tensors, self.family, repr(own))
        return known["fingerprint"]

    def every_label(self, n: int) -> Tensor | None:
        """Labels [n] with all classes in turn, and no label (-1) among them; None if the flow takes none."""
        return torch.arange(n) % (self.num_classes + 1) - 1 if self.num_classes else None

    def sample(
        self,
        n: int,
        *,
        labels: Labels | None = None,
        context: Tensor | None = None,
        plan: str | Path | Plan | None = None,
        tol: float | None = None,
        init: Init | None = None,
        max_deviation: float | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        guidance: float | Guidance = 0.0,
        denoise: bool = False,
        check: bool = False,
        on_failure: OnFailure = "fallback",
        backend: Backend | None = None,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> Decoded:
        """Decode fresh noise; for the options that are not described here see `decode`.

        seed: sample i depends on (seed, i) only. Default: torch's global generator, or `generator`.
        denoise: see `denoise`. check: see `decode`; residuals are those of the samples before they are denoised.
        batch_size: samples that are decoded at a time. Default: all of them.
        progress: show a progress bar.
        """
        for name, value in {"denoise": denoise, "check": check, "progress": progress}.items():
            arguments.switch(name, value)
        n = arguments.as_int("n", n)
        z = self.noise(n, seed, generator=generator)
        size = max(n, 1) if batch_size is None else arguments.as_int("batch_size", batch_size, 1)
        condition, guide = self._condition(n, labels, context), Guidance.of(guidance)
        setting: dict[str, Any] = {"guidance": guide, "backend": backend}
        automatic = plan is None or (isinstance(plan, str) and plan == "auto")
        if automatic and tol is None and init is None:  # the same plan for every batch
            some = _part(context, slice(size), 2)
            plan = self.plan("auto", max_deviation=max_deviation, n=min(n, size), context=some, **setting)
            max_deviation = None
        setting |= {"tol": tol, "init": init, "max_deviation": max_deviation, "on_failure": on_failure, "check": check}
        parts: list[Decoded] = []
        with progress_bar(desc="sampling", unit="sample", total=n, disable=not progress) as bar:
            for rows in (slice(i, i + size) for i in range(0, max(n, 1), size)):
                label, own = _part(labels, rows, 1), _part(context, rows, 2)
                out = self.decode(z[rows], plan, labels=label, context=own, warn=False, **setting)
                if not parts:
                    self._probe(tol, z, out, condition, guide)
                parts.append(replace(out, x=self.denoise(out.x, labels=label)) if denoise else out)
                bar.update(len(out.x))
        found = joined(parts)
        warn_of_nonfinite(found.x, z, guide)
        return found

    def denoise(self, x: Tensor, labels: Labels | None = None) -> Tensor:
        """x + sigma^2 grad log p(x), sigma the noise that the flow was trained with."""
        if not self.noise_std:
            raise ValueError("this flow was trained without Gaussian noise: there is nothing to denoise")
        arguments.tensor("x", x, next(self.parameters()), self.data_shape)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.log_prob(x, labels).sum(), x)
        return x.detach() + self.noise_std**2 * grad

    plan = resolve_plan

    def _condition(self, n: int, labels: Labels | None, context: Tensor | None) -> Tensor | None:
        """Labels [n] or context [n, C], checked; None where the flow is used without."""
        like = next(self.parameters())
        if labels is not None:
            return arguments.labels(labels, n, self.num_classes, like.device)
        if self.context_features:
            want = (n, self.context_features)
            if not isinstance(context, Tensor) or tuple(context.shape) not in (want, want[1:]) or context.is_complex():
                raise ValueError(f"this flow needs context of shape {list(want)}, a tensor of real numbers")
            if not bool(context.isfinite().all()):
                raise NonfiniteError("context has non-finite values")
            return context.to(like).expand(want)
        if context is not None:
            raise ValueError("this flow takes no context")
        return None

    def refuse_nonfinite(self) -> dict[str, str]:
        """Raise if a weight is not finite. Returns a place for what is known of the weights as they are."""
        return self._memo.look(self._groups(), self._seen_finite).made  # type: ignore[no-any-return]

    def _groups(self) -> Iterator[Group]:
        """The tensors of each block, and the flow's own."""
        for block in self.blocks:
            yield block.memo if isinstance(block, MemoModule) else None, tensors_of(block)
        yield None, (t for t in (*self._parameters.values(), *self._buffers.values()) if t is not None)

    def _seen_finite(self) -> dict[str, str]:
        for k, block in enumerate(self.blocks):
            for name, p in block.named_parameters():
                if not bool(p.detach().isfinite().all()):
                    place = len(self.blocks) - 1 - k
                    raise NonfiniteError(f"block {place} (blocks.{k} of the weights): {name} has non-finite values")
        var = self.prior_var()
        if var is not None and not bool((var.isfinite() & (var > 0)).all()):
            raise NonfiniteError("the prior variance has non-finite or non-positive values")
        if not math.isfinite(self.data_log_det()):
            raise NonfiniteError("the linear map next to the data is singular or has non-finite values")
        return {}

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write config.json, model.safetensors and README.md into `folder`; `jf.load` reads them."""
        from jacobiflow.flows.checkpoint import save

        save(self, folder, **options)

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Upload this flow as a checkpoint to `repo` ("user/model"); returns the commit's address."""
        from jacobiflow.flows.checkpoint import push_to_hub

        return push_to_hub(self, repo, **options)


def standard_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I) [N]."""
    z = z.flatten(1)
    return -0.5 * (z.square().sum(1) + z.shape[1] * math.log(2 * math.pi))


def _part(value: Any, rows: slice, dims: int) -> Any:
    """Some rows of labels [N] or context [N, C]; what is shared by all rows stays as it is."""
    return value[rows] if np.ndim(value) == dims else value
