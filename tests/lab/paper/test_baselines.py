"""Baselines learn, go on exactly where they were, and draw pictures that are their own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jacobiflow.core.results import JacobiflowError
from jacobiflow.data.decoding import Images
from jacobiflow_lab.baselines import KINDS, load_baseline, train_baseline
from jacobiflow_lab.baselines.fastgan import Config, Discriminator, Excite, Generator
from jacobiflow_lab.baselines.learner import BaselineError
from jacobiflow_lab.baselines.training import make
from jacobiflow_lab.metrics import fid_of, kid
from jacobiflow_lab.paper.generators import counts, shuffle_pixels

TINY: dict[str, dict[str, Any]] = {
    "ddim": {"channels": (8, 16), "groups": 4, "batch_size": 8, "warmup": 1, "lr": 2e-3},
    "fastgan": {"width": 8, "most": 16, "latent": 8, "batch_size": 8, "lr": 1e-3},
}
LONG = 1e6  # seconds: steps decide


@pytest.fixture(autouse=True)
def _alone() -> None:
    pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def images() -> Images:
    """Bright squares on dark ground, 16 x 16, in colour."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.full((64, 3, 16, 16), 30, dtype=torch.uint8)
    for image, (top, left) in zip(pixels, torch.randint(1, 8, (64, 2), generator=draw), strict=True):
        image[:, top : top + 7, left : left + 7] = torch.tensor([220, 180, 60])[:, None, None]
    return Images(pixels)


def train(kind: str, images: Images, out: Path, steps: int, **more: Any) -> Any:
    return train_baseline(kind, images, LONG, out, options=TINY[kind], steps=steps, log_every=1, **more)


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(kind: str, images: Images, tmp_path: Path) -> None:
    name = {"ddim": "loss", "fastgan": "rebuild"}[kind]  # a GAN's other losses are a game
    found = train(kind, images, tmp_path, 40)
    assert (found["kind"], found["steps"], found["images"]) == (kind, 40, 64)
    losses = [entry[name] for entry in logged(tmp_path)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    about = json.loads((tmp_path / "baseline.json").read_text())
    assert about["steps"] == 40
    assert about["settings"]["image_size"] == 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_exactly(kind: str, images: Images, tmp_path: Path) -> None:
    train(kind, images, tmp_path / "whole", 5)
    train(kind, images, tmp_path / "parts", 2)
    train(kind, images, tmp_path / "parts", 5)
    a, b = (load_baseline(kind, tmp_path / name).sample(3, seed=1) for name in ("whole", "parts"))
    assert torch.equal(a, b)
    whole, parts = logged(tmp_path / "whole"), logged(tmp_path / "parts")
    for entry in (*whole, *parts):
        del entry["seconds"]
    assert whole == parts
    train(kind, images, tmp_path / "other", 5, seed=1)
    assert not torch.equal(load_baseline(kind, tmp_path / "other").sample(3, seed=1), a)
    with pytest.raises(JacobiflowError, match="other settings"):
        train(kind, images, tmp_path / "parts", 6, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_depends_on_seed_and_number_only(kind: str, images: Images, tmp_path: Path) -> None:
    train(kind, images, tmp_path, 10)
    model = load_baseline(kind, tmp_path)
    many = model.sample(6, seed=5)
    assert many.shape == (6, 3, 16, 16)
    assert many.abs().max() <= 1
    assert (model.sample(1, seed=5, start=4)[0] - many[4]).abs().max() < 1e-5
    assert (model.sample(3, seed=5, start=2) - many[2:5]).abs().max() < 1e-5
    assert (model.sample(6, seed=6) - many).abs().max() > 5e-4
    assert (many[0] - many[1]).abs().max() > 5e-4
    torch.manual_seed(123)  # nobody else's generator is used
    assert torch.equal(model.sample(6, seed=5), many)


@pytest.mark.parametrize("kind", KINDS)
def test_seconds_are_the_budget_of_all_runs_together(kind: str, images: Images, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    found = train_baseline(kind, images, 1e-9, tmp_path, options=TINY[kind])
    assert found["steps"] == 1  # a step is never cut short
    assert found["seconds"] > 0
    again = train_baseline(kind, images, 1e-9, tmp_path, options=TINY[kind])
    assert again == found  # nothing is left of the budget
    assert torch.equal(torch.random.get_rng_state(), before)  # which is the user's
    assert load_baseline(kind, tmp_path).sample(1, seed=0).shape == (1, 3, 16, 16)


def test_diffusers_reads_what_was_written_and_we_read_theirs(images: Images, tmp_path: Path) -> None:
    import diffusers

    train("ddim", images, tmp_path / "ours", 2)
    pipeline = diffusers.DDIMPipeline.from_pretrained(tmp_path / "ours", local_files_only=True)
    pipeline.unet.save_pretrained(tmp_path / "theirs", safe_serialization=True)  # all at the top
    pipeline.scheduler.save_pretrained(tmp_path / "theirs")
    a, b = (load_baseline("ddim", tmp_path / name).sample(2, seed=0) for name in ("ours", "theirs"))
    assert torch.equal(a, b)


def test_the_averaged_weights_are_written(images: Images, tmp_path: Path) -> None:
    learner, _ = make("fastgan", images, TINY["fastgan"], 0, torch.device("cpu"))
    first = copy.deepcopy(learner.average.state_dict())
    for step in range(3):
        x = images.pixels[:8].float() / 127.5 - 1
        learner.step(step, x, torch.Generator().manual_seed(step))
    learner.export(tmp_path)
    held, live = load_baseline("fastgan", tmp_path).generator.state_dict(), learner.live.state_dict()
    name = "last.weight"
    assert torch.equal(held[name], learner.average.state_dict()[name])
    assert not torch.equal(held[name], live[name])
    assert not torch.equal(held[name], first[name])


def test_each_side_of_the_gan_moves_by_its_own_loss_only(images: Images) -> None:
    learner, _ = make("fastgan", images, TINY["fastgan"], 0, torch.device("cpu"))
    calls: list[set[str]] = []
    plain = learner.optimizer.step

    def step() -> None:
        calls.append({n.split(".")[0] for n, p in learner.model.named_parameters() if p.grad is not None})
        plain()

    learner.optimizer.step = step  # type: ignore[method-assign, assignment]
    learner.learn(images.pixels[:8].float() / 127.5 - 1, torch.Generator().manual_seed(0))
    assert calls == [{"discriminator"}, {"generator"}]


def test_a_new_critic_tells_images_apart(images: Images) -> None:
    """Spectral norms alone leave scores that differ by thousandths: a generator learns nothing from those."""
    torch.manual_seed(0)
    scores, _ = Discriminator(Config(image_size=16))(images.pixels.float() / 127.5 - 1)
    assert scores.std() > 0.1


@pytest.mark.parametrize("size", [16, 20, 28, 32, 64])
def test_networks_of_any_resolution(size: int) -> None:
    config = Config(image_size=size, image_channels=1, width=4, most=8, latent=6)
    generator, discriminator = Generator(config), Discriminator(config)
    x = generator(torch.randn(2, 6))
    assert x.shape == (2, 1, size, size)
    score, seen = discriminator(x)
    assert score.shape[-1] == config.start
    assert [f.shape[-1] for f in seen[:2]] == [size // 2, size // 4]
    loss = discriminator.rebuild(x, seen, torch.Generator().manual_seed(0))
    loss.backward()
    assert all(p.grad is not None for p in (*discriminator.whole.parameters(), *discriminator.piece.parameters()))
    assert len(generator.excites) == config.doublings - 1


def test_excitation_gates_channels_by_the_lower_resolution() -> None:
    gate = Excite(3, 5)
    high, low = torch.randn(2, 5, 8, 8), torch.randn(2, 3, 4, 4)
    ratio = gate(high, low) / high
    assert torch.allclose(ratio, ratio[:, :, :1, :1].expand_as(ratio), atol=1e-4)
    assert (ratio > 0).all()
    assert (ratio < 1).all()
    assert not torch.allclose(gate(high, low + 1), gate(high, low))


# Whether it counts


def test_shuffled_images_have_the_same_colours_in_other_places() -> None:
    pixels = torch.randint(0, 255, (3, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    mixed = shuffle_pixels(pixels)
    assert not torch.equal(mixed, pixels)
    for a, b in zip(mixed.flatten(2), pixels.flatten(2), strict=True):
        assert sorted(map(tuple, a.T.tolist())) == sorted(map(tuple, b.T.tolist()))


def blocks(pixels: Tensor) -> Tensor:
    """Features that see places: means of 4 x 4 blocks."""
    return torch.nn.functional.avg_pool2d(pixels.float() / 127.5 - 1, 4).flatten(1)


def test_a_baseline_counts_if_it_is_clearly_better_than_shuffled_images(images: Images) -> None:
    known = blocks(images.pixels[0::2])

    def judged(pixels: Tensor) -> dict[str, float]:
        seen = blocks(pixels)
        return {"fid": fid_of(known, seen).value, "kid": kid(known, seen).value}

    floor = judged(shuffle_pixels(images.pixels[1::2]))
    assert counts(judged(images.pixels[:20]), floor)
    assert not counts(judged(shuffle_pixels(images.pixels[:20], seed=9)), floor)
    good = {"fid": 0.6 * floor["fid"], "kid": 0.6 * floor["kid"]}
    assert counts(good, floor)
    for key in good:  # by both
        assert not counts(good | {key: 0.8 * floor[key]}, floor)


# Mistakes


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("vae", {}, "baselines are ddim, fastgan"),
        ("ddim", {"size": 3}, "size"),
        ("ddim", {"channels": (8,) * 6, "groups": 4}, "cannot be halved"),
        ("ddim", {"channels": (10, 12), "groups": 4}, "does not divide"),
        ("ddim", {"batch_size": 100}, "fewer than the batch size"),
    ],
)
def test_mistakes_name_the_value(
    kind: Any, options: dict[str, Any], words: str, images: Images, tmp_path: Path
) -> None:
    with pytest.raises(BaselineError, match=words):
        train_baseline(kind, images, 1.0, tmp_path, options=options)
    assert not (tmp_path / "state.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_without_a_checkpoint_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="checkpoint"):
        load_baseline(kind, tmp_path)
    with pytest.raises(BaselineError, match="baselines are"):
        load_baseline("vae", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(BaselineError, match="finite"):
        train_baseline(kind, Images(torch.zeros(1, 1, 16, 16, dtype=torch.uint8)), -1, tmp_path)
    with pytest.raises(BaselineError, match="square"):
        train_baseline(kind, Images(torch.zeros(1, 1, 16, 8, dtype=torch.uint8)), 1, tmp_path)


def test_sizes_that_no_generator_has() -> None:
    with pytest.raises(BaselineError, match="not 30"):
        Config(image_size=30)
