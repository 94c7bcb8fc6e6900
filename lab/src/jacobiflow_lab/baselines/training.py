"""The training loop of the baselines: it stops after a budget of seconds and can be resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from jacobiflow.core.processes import StopKey
from jacobiflow.data.decoding import Images
from jacobiflow.data.sources import DataConfig, load_images
from jacobiflow.data.transforms import prepare
from jacobiflow.training.loop import batches, generator
from jacobiflow.training.state import State
from jacobiflow_lab.baselines import ddim, fastgan
from jacobiflow_lab.baselines.learner import BaselineError, Learner, TrainedBaseline

Kind = Literal["ddim", "fastgan"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEARNERS: dict[str, Any] = {"ddim": ddim.DDIMLearner, "fastgan": fastgan.FastGANLearner}
ABOUT, LOG = "baseline.json", "log.jsonl"


def train_baseline(
    kind: Kind,
    data: Images | DataConfig,
    budget_seconds: float,
    out: str | Path,
    *,
    options: dict[str, Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    save_every: int = 200,
    log_every: int = 50,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a baseline on images into the folder `out`, for a number of seconds over all runs.

    The same call resumes a stopped run exactly. `out` then holds what `load_baseline` reads, and the state of the run.
    Returns what it wrote into ABOUT.

    data: images, or where they are; the training split is used. options: fields of the kind's Config.
    steps: the most steps. Default: as many as the seconds allow.
    """
    if kind not in KINDS:
        raise BaselineError(f"baselines are {', '.join(KINDS)}, not {kind!r}")
    if not 0 <= budget_seconds < math.inf:
        raise BaselineError(f"budget_seconds must be finite and not negative, not {budget_seconds}")
    images = load_images(data)[0] if isinstance(data, DataConfig) else data
    learner, settings = make(kind, images, options or {}, seed, torch.device(device))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    state = State(folder, settings, learner.model, learner.optimizer, learner.average)
    step = state.load()
    spent = learner.model.get_buffer("seconds")
    order = batches(len(images), learner.config.batch_size, seed, step)
    last = math.inf if steps is None else steps
    place = next(learner.model.parameters()).device
    with StopKey() as stop, open(folder / LOG, "a", encoding="utf-8") as log:
        while step < last and float(spent) < budget_seconds and not stop.pressed:
            began = time.perf_counter()
            x = prepare(images, next(order), generator(seed, step, 1), flip=learner.config.flip).x
            losses = learner.step(step, x.to(place), generator(seed, step, 2))
            step += 1
            spent += time.perf_counter() - began
            if step % log_every == 0:
                log.write(json.dumps({"step": step, "seconds": round(float(spent), 1), **losses}) + "\n")
                log.flush()
                shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
                progress(f"{kind} step {step}, {float(spent):.0f} of {budget_seconds:.0f} s: {shown}")
            if step % save_every == 0:
                state.save(step)
    state.save(step)
    if stop.pressed:
        raise BaselineError(f"stopped after step {step}: rerun the command to resume")
    learner.export(folder)
    about = {
        "kind": kind,
        "steps": step,
        "seconds": round(float(spent), 3),
        "images": len(images),
        "settings": settings,
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def make(
    kind: Kind, images: Images, options: dict[str, Any], seed: int, device: torch.device
) -> tuple[Learner, dict[str, Any]]:
    """A new learner for these images, and the settings that a resumed run must share."""
    _, colours, height, width = images.pixels.shape
    if height != width:
        raise BaselineError(f"baselines take square images, not {height} x {width}")
    try:
        config = LEARNERS[kind].config_type(image_size=height, image_channels=colours, **options)
    except TypeError as error:
        raise BaselineError(f"{kind}: {error}") from None
    if len(images) < config.batch_size:
        raise BaselineError(f"{len(images)} images are fewer than the batch size {config.batch_size}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        learner: Learner = LEARNERS[kind](config, device)
    settings = {"kind": kind, "seed": seed, "images": len(images)} | asdict(config)
    return learner, json.loads(json.dumps(settings))


def load_baseline(kind: Kind, source: str | Path, device: torch.device | str = "cpu") -> TrainedBaseline:
    """Load a folder written by `train_baseline`; for "ddim" also any diffusers folder or hub id."""
    if kind not in KINDS:
        raise BaselineError(f"baselines are {', '.join(KINDS)}, not {kind!r}")
    return ddim.load(source, device) if kind == "ddim" else fastgan.load(source, device)
