"""Samples that are not finite: every call says so once, with their number and what to do."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
import subjects
from jacobiflow.flows.compare import compare
from jacobiflow_lab.analysis.convergence import convergence
from subjects import tarflow


@pytest.fixture
def overflowing() -> jf.Flow:
    return subjects.overflowing()


def noise(flow: jf.Flow, bad: int, n: int = 6) -> torch.Tensor:
    z = flow.noise(n, seed=0)
    z[:, -1] = torch.where(torch.arange(n) < bad, 1.0, -1.0)
    return z


def told(call: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return found


@pytest.mark.parametrize("plan", ["sequential", "uniform", "selective"])
@pytest.mark.parametrize("on_failure", ["fallback", "return"])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_one_warning_with_the_count(overflowing: jf.Flow, plan: str, on_failure: Any, bad: int) -> None:
    z = noise(overflowing, bad)
    found = told(lambda: overflowing.decode(z, plan, on_failure=on_failure))
    want = f"{bad} of 6 samples are not finite: try float64, or check the weights"
    assert [str(w.message) for w in found] == [want] * bool(bad)
    assert all(w.category is RuntimeWarning and Path(w.filename) == Path(__file__) for w in found)
    out = overflowing.decode(z, plan, on_failure=on_failure, warn=False)
    assert out.stats.blocks[0].samples(jf.Status.NONFINITE) == list(range(bad))


def test_sample_warns_once_at_its_caller(overflowing: jf.Flow) -> None:
    (found,) = told(lambda: overflowing.sample(20, seed=0))
    lost = (overflowing.noise(20, seed=0)[:, -1] > 0).sum()
    assert str(found.message).startswith(f"{lost} of 20 samples are not finite: ")
    assert Path(found.filename) == Path(__file__)


def test_whoever_asked_for_an_error_gets_that_alone(overflowing: jf.Flow) -> None:
    with pytest.raises(jf.DecodingError):
        overflowing.decode(noise(overflowing, 2), on_failure="raise")


def test_the_cause(overflowing: jf.Flow) -> None:
    z = noise(overflowing, 2)
    with pytest.warns(RuntimeWarning, match="2 of 6 .*: check the weights$"):
        overflowing.double().decode(z.double())
    z = z.double()
    z[4, 1] = math.inf
    with pytest.warns(RuntimeWarning, match="^3 of 6 .*: replace the 1 rows of z .*; for the others, check"):
        overflowing.decode(z)
    with pytest.warns(RuntimeWarning, match="^1 of 4 .*: replace the 1 rows of z that are not finite$"):
        overflowing.decode(z[2:])


@pytest.mark.parametrize("guidance", [1e6, jf.Guidance(weight=1e6, what="a")])
def test_guidance_that_is_too_strong(guidance: Any) -> None:
    flow = tarflow(0.25, num_classes=3)
    assert told(lambda: flow.sample(3, labels=1, seed=0)) == []
    words = r"of 3 samples are not finite: lower the guidance weight \(it is 1e\+06\), .*check the weights$"
    with pytest.warns(RuntimeWarning, match=words):
        flow.sample(3, labels=1, seed=0, guidance=guidance)


def test_denoising_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `sample` hands out is what is counted."""
    flow = tarflow(0.25)
    monkeypatch.setattr(flow, "denoise", lambda x, labels: x / (torch.arange(3).view(3, 1, 1, 1) != 1))
    with pytest.warns(RuntimeWarning, match="^1 of 3 samples"):
        flow.sample(3, seed=0, denoise=True)


def test_studies_that_report_it_themselves_do_not_warn(overflowing: jf.Flow) -> None:
    """A warning is an error here."""
    z = noise(overflowing, 3)
    compare(overflowing, z, ["uniform"], [2, 6], repeats=2)
    convergence(overflowing, z)
    jf.tune(overflowing, 4)
