"""The loop, in this process: what a step does, what a run writes, what it refuses."""

from __future__ import annotations

import importlib
import io
import json
import math
import re
import sys
import warnings
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow.core.pictures import save_images
from jacobiflow.core.processes import World
from jacobiflow.training import loop
from jacobiflow.training.log import Log
from jacobiflow.training.loop import Trainer, batches, generator, learning_rate
from jacobiflow.training.recipe import Recipe, TrainingConfig
from jacobiflow.training.state import TrainingError
from jacobiflow.training.train import build_flow, load_for

MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist.npz"


def trainer(recipe: Path, out: Path, *, model: dict[str, Any] | None = None, **training: Any) -> Trainer:
    found = Recipe.load(recipe)
    found = replace(
        found,
        model=replace(found.model, **(model or {})),
        training=replace(found.training, **training),
    )
    torch.manual_seed(0)
    return Trainer(found, build_flow(found.model), *load_for(found), out, World())


def steps(subject: Trainer, count: int) -> list[float]:
    """The losses of the first steps."""
    config = subject.config
    order = batches(len(subject.train), config.batch_size, config.seed, 0)
    return [subject.step(i, index)[0] for i, index in enumerate(islice(order, count))]


def weights(flow: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in flow.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in log if "loss" in entry]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.array(picture)


# ---- schedule and order


@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.25, 1.0, 3.0])
def test_schedule(warmup):
    config = TrainingConfig(lr=0.5, final_lr=0.01, warmup_epochs=warmup)
    rates = [learning_rate(i, 10, 100, config) for i in range(101)]
    rising = math.ceil(warmup * 10)
    assert max(rates) <= 0.5
    assert all(a < b for a, b in pairwise(rates[: rising or 1]))
    assert all(a >= b for a, b in pairwise(rates[max(rising - 1, 0) :]))
    if warmup == 1:
        assert rates[:10] == pytest.approx([0.05 * i for i in range(1, 11)])
        assert rates[55] == pytest.approx((0.5 + 0.01) / 2)
    assert rates[100] == pytest.approx(0.01)


def test_an_epoch_takes_every_image_once():
    found = list(islice(batches(22, 5, 7, 0), 12))  # 4 batches an epoch, 2 images left over
    epochs = [torch.cat(found[i : i + 4]) for i in (0, 4, 8)]
    assert all(len(epoch.unique()) == 20 for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(found[0], next(batches(22, 5, 8, 0)))


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_the_order_can_be_entered_anywhere(step):
    whole = list(islice(batches(22, 5, 7, 0), 12))
    assert all(map(torch.equal, whole[step:], islice(batches(22, 5, 7, step), 12 - step)))


# ---- one step


def test_a_step_is_adamw_on_the_mean_loss(recipe, tmp_path):
    subject = trainer(recipe, tmp_path, clip=0.0, flip=False, label_drop=0.0, betas=(0.8, 0.7))
    index = torch.arange(16)
    batch = subject.batch(subject.train, index, loop.generator(0, 0, 1), augment=True)
    other = build_flow(subject.recipe.model)
    other.load_state_dict(subject.flow.state_dict())
    config = subject.config
    adamw = torch.optim.AdamW(other.parameters(), betas=(0.8, 0.7), weight_decay=config.weight_decay)
    adamw.param_groups[0]["lr"] = learning_rate(0, subject.per_epoch, subject.total, config)
    wanted = -other.log_prob(batch.x, batch.labels).mean() / 64
    wanted.backward()
    adamw.step()
    loss, _ = subject.step(0, index)
    assert loss == pytest.approx(wanted.item(), abs=1e-6)
    for mine, its in zip(subject.flow.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-5)


def test_the_contrast_tells_a_label_from_a_wrong_one(recipe, tmp_path):
    subject = trainer(recipe, tmp_path, contrast=0.5, label_drop=0.3)
    with torch.no_grad():
        for p in subject.flow.parameters():
            p.add_(0.05 * torch.randn_like(p))
    batch = subject.batch(subject.train, torch.arange(16), loop.generator(0, 0, 1), augment=True)
    assert torch.equal(batch.wrong, 1 - subject.train.labels[:16])
    assert -1 in batch.labels[:8]
    with torch.no_grad():
        own, other = (subject.flow.log_prob(batch.x, labels) for labels in (batch.labels, batch.wrong))
        posterior = own.exp() / (own.exp() + other.exp())
        told = torch.where(batch.labels[:8] < 0, 0, -posterior[:8].log()).sum() / 8
        assert told > 0.03
        found = subject.loss(*batch)[0]
    assert found.item() == pytest.approx((-own.mean() / 64 + 0.5 * told).item(), abs=1e-5)
    assert subject.batch(subject.validation, torch.arange(4), loop.generator(1), augment=False).wrong is None


def test_the_contrast_teaches_labels(recipe, tmp_path):
    """Of classes that look alike: a label's share of the likelihood grows with the contrast, and hardly without."""

    def share(contrast: float) -> float:
        subject = trainer(recipe, tmp_path, contrast=contrast, epochs=12, label_drop=0.0)
        noisy = subject.train.pixels.clone()
        noisy[:, :, :, 4:] = torch.randint(0, 250, noisy[:, :, :, 4:].shape, generator=loop.generator(0)).byte()
        noisy[:, :, 0, 0] = 40 + 40 * subject.train.labels[:, None].byte()
        subject.train.pixels.copy_(noisy)
        steps(subject, 60)
        batch = subject.batch(subject.train, torch.arange(64), loop.generator(5), augment=False)
        with torch.no_grad():
            own, other = (subject.flow.log_prob(batch.x, labels) for labels in (batch.labels, 1 - batch.labels))
        return (own - other).sigmoid().log().mean().item()

    assert share(1.0) > share(0.0) + 0.05


def test_a_class_without_images_is_never_a_wrong_label(recipe, tmp_path):
    subject = trainer(recipe, tmp_path, model={"num_classes": 5}, contrast=0.1)
    batch = subject.batch(subject.train, torch.arange(64), loop.generator(0), augment=True)
    assert torch.isfinite(subject.means).all()
    assert (batch.wrong != subject.train.labels[:64]).all()
    shown = subject.train.pixels[subject.train.labels == 1].float().mean(0).flatten() / 127.5 - 1
    torch.testing.assert_close(subject.means[1], shown)
    assert (torch.cdist(batch.x.flatten(1), subject.means)[:, 2:] > 100).all()


def test_a_contrast_needs_classes(recipe, tmp_path):
    with pytest.raises(TrainingError, match=r"training\.contrast needs a model and data with two or more classes"):
        trainer(recipe, tmp_path, model={"num_classes": 0}, contrast=0.1)


def test_gradients_are_clipped(recipe, tmp_path):
    for clip in (0.0, 0.01):
        subject = trainer(recipe, tmp_path, clip=clip)
        _, norm = subject.step(0, torch.arange(16))
        squares = sum(float(p.grad.square().sum()) for p in subject.flow.parameters())
        assert norm > 0.1  # as it was before
        assert math.sqrt(squares) == pytest.approx(clip or norm, rel=1e-3)


@pytest.mark.parametrize("volume_preserving", [False, True])
def test_accumulation_changes_nothing(recipe, tmp_path, volume_preserving):
    model = {"volume_preserving": volume_preserving}
    whole = trainer(recipe, tmp_path, model=model, epochs=6)
    parts = trainer(recipe, tmp_path, model=model, epochs=6, accumulate=2)
    assert steps(parts, 30) == pytest.approx(steps(whole, 30), abs=1e-5)
    torch.testing.assert_close(parts.flow.prior_var(), whole.flow.prior_var(), atol=1e-5, rtol=1e-5)


def test_the_prior_variance_is_tracked(recipe, tmp_path):
    subject = trainer(recipe, tmp_path, model={"volume_preserving": True}, flip=False, label_drop=0.0)
    var = torch.ones(4, 16)
    for i in range(3):
        index = torch.arange(16) + i
        batch = subject.batch(subject.train, index, loop.generator(0, i, 1), augment=True)
        with torch.no_grad():
            z = subject.flow.encode(batch.x, batch.labels).z * subject.flow.prior_var().sqrt()
        var = 0.9 * var + 0.1 * z.square().mean(0)
        subject.step(i, index)
        torch.testing.assert_close(subject.flow.prior_var(), var)
    assert (var - 1).abs().max() > 0.05
    plain = trainer(recipe, tmp_path)
    steps(plain, 3)
    assert (plain.flow.prior_var() == 1).all()


def test_averaged_weights(recipe, tmp_path):
    subject = trainer(recipe, tmp_path, model={"volume_preserving": True}, ema=0.25)
    average = {k: v.detach().clone() for k, v in subject.flow.named_parameters()}
    for i, decay in enumerate((1 / 10, 2 / 11, 0.25, 0.25)):  # (1 + step) / (10 + step) until it reaches ema
        subject.step(i, torch.arange(16) + i)
        average = {k: decay * average[k] + (1 - decay) * v.detach() for k, v in subject.flow.named_parameters()}
    for name, value in subject.result.named_parameters():
        torch.testing.assert_close(value, average[name])
    assert torch.equal(subject.result.prior_var(), subject.flow.prior_var())
    assert not same(weights(subject.result), weights(subject.flow))


def test_the_average_of_a_short_training_is_trained(recipe, tmp_path):
    """A decay of 0.999 throughout would leave nine tenths of the initial weights."""
    subject = trainer(recipe, tmp_path, ema=0.999, epochs=16)
    before = subject.evaluate()
    steps(subject, 80)
    average = subject.evaluate()
    subject.result = subject.flow
    assert average - subject.evaluate() < 0.3 * (before - subject.evaluate())


def test_labels_and_flips_are_for_training_only(recipe, tmp_path):
    subject = trainer(recipe, tmp_path, label_drop=0.9, noise="gaussian")
    index, draw = torch.arange(10), loop.generator
    assert (subject.batch(subject.train, index, draw(1), augment=True).labels == -1).any()
    held = subject.batch(subject.validation, index, draw(1), augment=False)
    assert torch.equal(held.labels, subject.validation.labels[index])
    clean = subject.validation.pixels[index].float() / 127.5 - 1
    assert (held.x - clean).abs().max() < 0.6


def test_compile_wraps_the_loss(recipe, tmp_path, monkeypatch):
    wrapped = []

    class Compiled(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0
            wrapped.append(self)

        def forward(self, *args: Any) -> Any:
            self.calls += 1
            return self.module(*args)

    plain = steps(trainer(recipe, tmp_path), 3)
    monkeypatch.setattr(torch, "compile", Compiled)
    subject = trainer(recipe, tmp_path, compile=True, accumulate=2)
    assert steps(subject, 3) == pytest.approx(plain, abs=1e-5)
    assert [w.calls for w in wrapped] == [6]
    assert not any("module" in name for name in weights(subject.result))  # and leaves the flow as it is


def test_bf16_is_off_on_cpus_unless_asked_for(recipe, tmp_path, monkeypatch):
    for asked in (None, False):
        with trainer(recipe, tmp_path, bf16=asked)._autocast():
            assert not torch.is_autocast_enabled("cpu")
    monkeypatch.setattr(loop, "has_bfloat16", lambda device: True)
    subject = trainer(recipe, tmp_path, bf16=True)
    with subject._autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    monkeypatch.setattr(loop, "has_bfloat16", lambda device: False)
    with pytest.raises(TrainingError, match="this processor has no bfloat16 instructions"):
        trainer(recipe, tmp_path, bf16=True)


def test_bf16_changes_the_products_and_little_else(recipe, tmp_path, monkeypatch):
    """Parameters of the map, its log-determinant and the loss stay float32."""
    monkeypatch.setattr(loop, "has_bfloat16", lambda device: True)
    plain, rounded = (trainer(recipe, tmp_path, bf16=bf16) for bf16 in (False, True))
    batch = rounded.batch(rounded.train, torch.arange(16), generator(0, 0, 1), augment=False)
    with rounded._autocast():
        block = rounded.flow.bound_blocks(16, labels=batch.labels)[0]
        theta = block.conditioner.all_params(rounded.flow.to_sequence(batch.x))
        loss, z_squared = rounded.loss(batch.x, batch.labels)
    assert theta.dtype == loss.dtype == z_squared.dtype == torch.float32
    losses = [steps(one, 10) for one in (plain, rounded)]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


# ---- runs


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    """A run with everything on: its folder and its log."""
    out = tmp_path_factory.mktemp("run")
    flags = "--training.epochs 4 --training.ema 0.5 --training.keep-every 6 --training.sample-every 10"
    return out, train(out, *flags.split(), "--model.volume-preserving")


def test_the_loss_goes_down(train, tmp_path):
    found = losses(train(tmp_path, "--training.epochs", 20))
    assert len(found) == 100
    assert np.mean(found[-10:]) < np.mean(found[:5]) - 0.8


@pytest.mark.skipif(not MNIST.exists(), reason="needs mnist.npz")
def test_the_loss_goes_down_on_real_data(train, tmp_path):
    flags = (
        "--model.width 32 --model.head-dim 16 --model.blocks 2 --model.layers-per-block 1 "
        "--model.patch-size 7 --data.limit 960 --training.epochs 2 --training.lr 0.01 --training.log-every 1 "
        "--training.sample-every 0 --training.validate 100"
    )
    log = train(tmp_path, "--data.source", MNIST, *flags.split(), recipe="mnist-cpu")
    found = losses(log)
    assert len(found) == 30
    assert np.mean(found[-5:]) < np.mean(found[:5]) - 0.5
    first, second = (entry["validation"] for entry in log if "validation" in entry)
    assert second < first


def test_the_log(finished):
    _, log = finished
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(1, 21))
    assert [entry["step"] for entry in log if "validation" in entry] == [5, 10, 15, 20]
    assert set(log[0]) == {"step", "epoch", "loss", "norm", "lr", "rate"}
    assert log[-1]["epoch"] == 4


def test_what_a_run_leaves(finished):
    out, _ = finished
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    folders = ["model", *(f"kept/step-{step:07d}" for step in (6, 12, 18))]
    parts = ("config.json", "model.safetensors", "README.md")
    assert files == {f"{folder}/{part}" for folder in folders for part in parts} | {
        "model/guess.safetensors",
        "model/profile.json",
        ".lock",
        "log.jsonl",
        "state.safetensors",
        "samples/step-0000010.png",
        "samples/step-0000020.png",
    }


def test_the_model_is_the_averaged_flow(finished, recipe):
    out, log = finished
    subject = trainer(recipe, out, model={"volume_preserving": True}, epochs=4, ema=0.5)
    assert subject.state.load() == 20
    loaded = jf.load(out / "model")
    assert same(weights(loaded), weights(subject.result))
    assert not same(weights(loaded), weights(subject.flow))
    batch = subject.batch(subject.validation, torch.arange(8), loop.generator(3), augment=False)
    with torch.no_grad():
        mine = subject.result.log_prob(batch.x, batch.labels)
        assert torch.equal(loaded.log_prob(batch.x, batch.labels), mine)
    alone = trainer(recipe, out, model={"volume_preserving": True})
    alone.flow.load_state_dict(loaded.state_dict())
    assert alone.evaluate() == log[-1]["validation"]  # of what the model is, not of what it was made from


def test_kept_weights_are_those_of_their_step(finished, recipe, tmp_path):
    out, _ = finished
    subject = trainer(recipe, tmp_path, model={"volume_preserving": True}, epochs=4, ema=0.5)
    steps(subject, 12)
    assert same(weights(jf.load(out / "kept" / "step-0000012")), weights(subject.result))


def test_pictures_are_samples_of_the_fast_decoder(finished, tmp_path):
    out, _ = finished
    labels = torch.arange(16) % 2
    flow = jf.load(out / "model")
    flow.calibration = None  # fitted after the last picture
    x = flow.sample(16, labels=labels, seed=0, plan="selective").x
    save_images(x, tmp_path / "wanted.png", columns=2)
    shown = pixels(out / "samples" / "step-0000020.png")
    assert np.array_equal(shown, pixels(tmp_path / "wanted.png"))


def test_validation_is_deterministic(recipe, tmp_path):
    subject = trainer(recipe, tmp_path)
    first = subject.evaluate()
    torch.manual_seed(99)
    torch.rand(5)
    assert subject.evaluate() == first
    before = weights(subject.flow)
    assert same(weights(subject.flow), before)
    steps(subject, 2)
    assert subject.evaluate() != first


def test_a_run_without_validation_images(train, tmp_path):
    assert not any("validation" in entry for entry in train(tmp_path, "--data.validation", 0))


@pytest.mark.parametrize("noise", ["dequantize", "binary"])
def test_maf_of_flattened_images(train, tmp_path, noise):
    flags = (
        f"--model.features 64 --model.blocks 2 --model.hidden 32 --training.noise {noise} "
        "--training.epochs 12 --training.batch-size 16 --training.log-every 1 --training.sample-every 40"
    )
    source = tmp_path / "grey.npz"
    draw = np.random.default_rng(0)
    np.savez(source, x=draw.integers(0, 256, (84, 8, 8), dtype=np.uint8) // np.arange(1, 9, dtype=np.uint8))
    log = train(tmp_path / "run", "--data.source", source, *flags.split(), recipe="mnist-maf")
    assert np.mean(losses(log)[-5:]) < np.mean(losses(log)[:5]) - 0.1
    for step in (40, 60):
        shown = pixels(tmp_path / "run" / "samples" / f"step-{step:07d}.png")
        assert shown.shape == (2 * (8 * 9 + 1), 2 * (8 * 9 + 1))
        assert shown.std() > 10
    flow = jf.load(tmp_path / "run" / "model")
    assert flow.config.noise == noise
    assert isinstance(flow, jf.MAF)
    assert flow.log_prob(torch.zeros(3, 64)).shape == (3,)


# ---- what people see


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(train, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    train(tmp_path)
    text = sys.stderr.getvalue()
    assert "10/10" in text
    assert "loss=" in text
    assert "rate=" in text
    assert re.search(r"\d (steps per s|s per step), ", text)
    assert "validation=" in text
    assert " left" not in text  # as in the lines of a file


def test_plain_lines_elsewhere(train, tmp_path, capsys):
    train(tmp_path, "--training.log-every", 5)
    first, second, *lines, measuring, last = capsys.readouterr().err.splitlines()
    assert measuring == "measuring how fast sweeps converge, for plan auto"
    assert first.endswith(" parameters, 80 images and 16 for validation")
    assert second == f"10 steps on cpu, into {tmp_path}"
    assert [line.partition(", ")[0] for line in lines] == ["5 of 10 steps", "10 of 10 steps"]
    shown = r", [\d,.]+ (steps per s|s per step), \d\d:\d\d left, loss=[-\d.]+, rate=[\d.e+]+, validation=[-\d.]+$"
    assert all(re.search(shown, line) for line in lines)
    assert last == f"done; try: jacobiflow sample {tmp_path / 'model'} -n 16 --out samples"


def test_a_step_is_shown_once(tmp_path, monkeypatch, capsys):
    """Also where its line is due for both reasons: a value is logged, and the last line was long ago."""
    monkeypatch.setattr("jacobiflow.core.progress.LINE_SECONDS", 0.0)
    with Log(tmp_path, 0, 4, tensorboard=False) as subject:
        for step in range(1, 5):
            subject.advance(16, 0.5)
            subject.write(step=step, epoch=1.0, **({"validation": 0.25} if step % 2 == 0 else {}))
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("0 of ")]
    assert [line.partition(", ")[0] for line in lines] == [f"{step} of 4 steps" for step in range(1, 5)]
    assert "validation=0.25" in lines[-1]
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [2, 4]


def test_the_first_steps_tell_how_long_it_takes(tmp_path, monkeypatch, capsys):
    """The step that warms up does not count, and shorter runs say nothing."""
    for each, total, said in ((1.5, 4000, ["about 1.7 h for 3,997 steps, 1.5 s per step"]), (1.5, 20, [])):
        now = iter([0.0, 90.0, 90.0 + 2 * each])
        monkeypatch.setattr("jacobiflow.training.log.perf_counter", lambda now=now: next(now))
        with Log(tmp_path, 0, total, tensorboard=False) as subject:
            for _ in range(6):
                subject.advance(16, 0.5)
            subject.bar.disable = True  # what closing it says is another test's
        assert capsys.readouterr().err.splitlines() == said


def test_the_end_as_json(train, tmp_path, capsys):
    lines = train(tmp_path, "--json")
    doc = json.loads(capsys.readouterr().out)
    assert doc["model"] == str(tmp_path / "model")
    assert doc["step"] == 10
    at_the_end = {k: v for line in lines if line["step"] == 10 for k, v in line.items()}
    assert doc == {"out": str(tmp_path), "model": doc["model"], **at_the_end}
    assert {"loss", "validation"} <= doc.keys()


def test_a_value_that_is_not_finite_is_null(tmp_path):
    with Log(tmp_path, 0, 1, tensorboard=False) as subject:
        subject.write(step=1, epoch=1.0, loss=1.5, validation=math.inf)
    assert json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "epoch": 1.0,
        "loss": 1.5,
        "validation": None,
    }


def test_tensorboard(train, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        log = train(tmp_path, "--training.tensorboard")
        events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {e.step: e.value for e in events.Scalars("loss")}
    assert found == pytest.approx({e["step"]: e["loss"] for e in log if "loss" in e}, rel=1e-6)
    assert [e.step for e in events.Scalars("validation")] == [5, 10]


def test_tensorboard_that_is_missing(refusal, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install '.[tensorboard]' in the checkout" in refusal("--out", tmp_path, "--training.tensorboard")


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data.source gone.npz", "gone.npz does not exist"),
        ("--training.batch-size 81", "80 training images are fewer than training.batch_size 81"),
        ("--training.batch-size 15 --training.accumulate 2", "15 does not divide among 1 processes x 2"),
        ("--model.num-classes 1", "label 1 of image 1 is outside 0 to 0: set num_classes to 2"),
        ("--training.lr fast", "--training.lr must be a number, not 'fast'"),
        ("--training.lrr 1", "--training.lrr"),
        ("--training.epochs -1", "training.epochs must be positive, not -1"),
        ("--training.betas 2 0.9", "beta"),
        ("--training.noise none", "model.noise_std 0.1 is for training.noise gaussian, not none"),
        ("--model.patch-size 3", "patch_size 3 does not divide image_size 8"),
        ("--device tpu9", "--device must be auto, cpu, cuda"),
        ("--training.lr 1e30 --training.clip 0", "lower training.lr or set training.clip"),
    ],
)
def test_a_mistake_is_one_line(refusal, tmp_path, flags, words):
    assert words in refusal("--out", tmp_path / "out", *flags.split())


def test_no_data_and_no_images_for_a_vector(refusal, recipe, tmp_path):
    out = ("--out", tmp_path / "out")
    assert "the recipe names no data" in refusal(*out, "--data.source", "")
    maf = {"recipe": "mnist-maf"}
    assert "features 50 is no square" in refusal(*out, "--model.features", 50, **maf)
    assert "set model.context to 0, not 2" in refusal(*out, "--model.context", 2, **maf)


def test_a_loss_that_is_not_finite_leaves_the_weights(recipe, tmp_path):
    subject = trainer(recipe, tmp_path)
    steps(subject, 2)
    before = weights(subject.flow)
    subject.batch = lambda *_, **__: loop.Batch(torch.full((16, 1, 8, 8), math.inf), None)
    with pytest.raises(loop.TrainingError, match="at step 2: lower training"):
        subject.step(2, torch.arange(16))
    assert same(weights(subject.flow), before)


def test_too_little_memory_is_one_line(refusal, tmp_path, monkeypatch):
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(loop.Loss, "forward", full)
    assert refusal("--out", tmp_path) == "out of memory: raise training.accumulate or lower the batch size"
