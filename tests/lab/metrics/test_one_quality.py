"""`evaluate` and `reproduce` measure quality in one way, and a metric is one row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.data.decoding import Images
from jacobiflow.flows.guidance import Guidance
from jacobiflow_lab.metrics import METRICS, Metric, evaluate
from jacobiflow_lab.metrics.samples import Scorers, collect
from jacobiflow_lab.paper import quality
from stand_ins import Tiny

ASKED = ("fid", "kid", "brisque", "paired")


@pytest.fixture
def spoiled(flow: jf.TarFlow, monkeypatch: pytest.MonkeyPatch) -> jf.TarFlow:
    """The flow with every fifth sample lost, and every seventh of exact decoding."""
    decode = flow.decode
    noise = [row.sum().item() for row in flow.noise(40, 0)]

    def partly(z: torch.Tensor, plan: Any, **options: Any) -> Any:
        out = decode(z, plan, **options)
        exact = all(method.width == 1 for method in plan)
        for i, row in enumerate(z):
            number = noise.index(row.sum().item())
            if number % 5 == 0 or (exact and number % 7 == 0):
                out.x[i] = math.nan
        return out

    monkeypatch.setattr(flow, "decode", partly)
    return flow


def reproduced(flow: jf.Flow, data: Images, n: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `reproduce` finds for selective decoding of this flow."""
    made: dict[Any, Any] = {}
    session = SimpleNamespace(
        once=lambda key, make: made[key] if key in made else made.setdefault(key, make()),
        annealed_guidance=Guidance(),
        clip="",
        note=lambda text: None,
    )
    task: Any = SimpleNamespace(
        session=session,
        model="model",
        seed=0,
        flow=flow,
        images=(data, data),
        device=torch.device("cpu"),
    )
    monkeypatch.setattr(quality, "load_inception", lambda device: Tiny())
    plans = {name: flow.plan(name) for name in ("sequential", "selective")}
    found = quality.judge(task, plans, dict.fromkeys(plans, n), full=True, scored=n)
    return found["selective"]


@pytest.mark.parametrize("lost", [False, True], ids=["finite", "not finite"])
def test_both_commands_get_the_same_numbers(
    lost: bool, flow: jf.TarFlow, images: Images, request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    model = request.getfixturevalue("spoiled") if lost else flow
    ours = evaluate(model, images, metrics=ASKED, samples=40, plan="selective", network=Tiny())
    theirs = reproduced(model, images, 40, monkeypatch)
    assert theirs["not_finite"] == ours.not_finite == (8 if lost else 0)
    assert theirs["samples"] == ours.samples == 40
    assert theirs["scored"] == ours.fid.samples == 40 - ours.not_finite
    assert ours.paired.samples == (40 - 8 - 4 if lost else 40)  # 7, 14, 21, 28 are lost to the reference
    assert theirs["fid"] == pytest.approx(ours.fid.value)
    assert theirs["kid"] == pytest.approx(ours.kid.value)
    assert theirs["kid_std"] == pytest.approx(ours.kid.std)
    assert theirs["paired"] == pytest.approx(ours.paired.value)
    assert theirs["brisque"] == pytest.approx(ours.brisque.value)


def test_the_first_samples_of_many(spoiled: jf.TarFlow) -> None:
    """Features of the first n are those that n alone would have, lost ones or not."""

    def draw(start: int, count: int) -> torch.Tensor:
        return spoiled.decode(spoiled.noise(count, 0, start=start), spoiled.plan("selective")).x

    scorers = Scorers(Tiny())
    many, few = collect(draw, 30, scorers), collect(draw, 12, scorers)
    assert torch.equal(many.first(12).moments.features, few.moments.features)
    assert (many.first(12).count, many.first(12).not_finite) == (12, few.not_finite) == (12, 3)
    mine, same = many.first(12).paired_features(few)
    assert torch.equal(mine, same)


@dataclass(frozen=True)
class Brightness:
    value: float


def test_a_metric_is_one_row(flow: jf.TarFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Metric(
        name="mean-grey",
        help="mean grey level",
        needs=("images",),
        rows=(("brightness", "{value:.1f}", "", "samples"),),
        score=lambda clip, device: lambda pixels: pixels.float().mean((1, 2, 3)),
        result=lambda evidence: Brightness(float(evidence["samples"].scores["mean-grey"].mean())),
    )
    monkeypatch.setitem(METRICS, metric.name, metric)
    found = evaluate(flow, metrics=["mean-grey"], samples=6, batch=4)
    assert 0 < found.mean_grey.value < 255
    assert found.to_dict()["results"] == {"mean-grey": {"value": found.mean_grey.value}}
    assert metric.text(found.mean_grey) == [("brightness", f"{found.mean_grey.value:.1f}", "", "samples")]
    assert found.fid is None
    with pytest.raises(AttributeError, match="no metric is called 'beauty'"):
        _ = found.beauty
