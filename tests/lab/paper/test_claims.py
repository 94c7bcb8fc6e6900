"""Verdicts on the paper's claims: each can say yes, say no, and say that it is undecided."""

from __future__ import annotations

from typing import Any

import pytest

from jacobiflow_lab.paper import claims
from jacobiflow_lab.paper.claims import CLAIMS
from jacobiflow_lab.paper.judge import judge_claims, verdict_word


def quality(kid: float, fid: float | None = None) -> dict[str, Any]:
    return {"fid": fid, "kid": kid}


def tolerance(mild: dict[str, Any], loose: dict[str, Any]) -> dict[str, Any]:
    rows = [("sequential", mild, 1.0), ("0.5", mild, 0.8), ("2", loose, 0.5)]
    return {"rows": [{"method": m, "quality": q, "seconds": s} for m, q, s in rows]}


@pytest.mark.parametrize(
    ("mild", "loose", "holds"),
    [
        (quality(0.02), quality(0.05), True),
        (quality(0.05), quality(0.02), False),
        (quality(0.02), quality(0.0208), False),  # by 4%, which is slight
        (quality(0.02, 30.0), quality(0.02, 33.0), False),  # FID stands beside it
        (quality(0.02, 33.0), quality(0.09, 30.0), True),
    ],
)
def test_worse_above(mild: dict[str, Any], loose: dict[str, Any], holds: bool) -> None:
    found, numbers = claims.worse_above(tolerance(mild, loose))
    assert found is holds
    assert numbers["KID, tau 2"] == loose["kid"]
    assert numbers.get("FID, tau 2") == loose["fid"]
    assert claims.faster_with_tau(tolerance(mild, loose))[0] is True


@pytest.mark.parametrize(
    ("exact", "ours", "holds"),
    [
        (quality(0.02, 10.0), quality(0.03, 10.5), False),  # by 50%, whatever FID says
        (quality(0.02, 10.0), quality(0.02, 10.6), True),
        (quality(0.02), quality(0.0209), True),  # by 4.5%
        (quality(0.02), quality(0.0212), False),  # by 6%
        (quality(0.02), quality(0.01), True),
        (quality(-0.001), quality(0.01), None),
    ],
)
def test_quality(exact: dict[str, Any], ours: dict[str, Any], holds: bool | None) -> None:
    data = {"quality": {"sequential": exact, "selective": ours}}
    assert claims.quality_of(data, "selective")[0] is holds


@pytest.mark.parametrize(("sweeps", "last", "holds"), [(8, 1e-12, True), (9, 1e-12, False), (8, 1e-3, False)])
def test_bounded(sweeps: int, last: float, holds: bool) -> None:
    easy = {"length": 8, "sweeps": 2, "jacobi": [1.0, 0.1, 0.0]}
    hard = {"length": 8, "sweeps": sweeps, "jacobi": [1.0] * sweeps + [last]}
    found, numbers = claims.bounded({"blocks": [easy, hard]})
    assert found is holds
    assert numbers == {"most sweeps": sweeps, "positions": 8}


@pytest.mark.parametrize(
    ("far", "holds"),
    [((0.2, 0.4, 0.8), True), ((0.2, 0.4, 1.2), False), ((0.5, 0.4, 0.8), False)],
)
def test_still_pictures(far: tuple[float, ...], holds: bool) -> None:
    rows = [
        {"variant": v, "o": o, "paired_relative": x}
        for v in ("attention", "strict")
        for o, x in zip((1, 2, 5), far if v == "attention" else (9.0, 9.0, 9.0), strict=True)
    ]
    assert claims.still_pictures({"rows": rows})[0] is holds


def test_memory_is_that_of_selective_decoding() -> None:
    def peaks(without: float) -> dict[str, Any]:
        found = (("sequential", True, 5.0), ("selective", True, 10.0), ("selective", False, without))
        return {"peaks": [{"plan": p, "cache": c, "peak_mib": m} for p, c, m in found]}

    assert claims.less_memory(peaks(3.0))[0] is True
    assert claims.less_memory(peaks(6.0))[0] is False


def test_speed_is_of_whole_batches_over_public_code() -> None:
    def data(selective: float, uniform: float) -> dict[str, Any]:
        rows = [("selective", selective), ("uniform", uniform)]
        return {
            "speed": [
                {
                    "batch": b,
                    "method": m,
                    "whole_against_plain": s * b / 16,
                    "against_plain": s,
                    "speedup": s / 4,
                }
                for b in (1, 16)
                for m, s in rows
            ]
        }

    assert claims.selective_wins(data(2.0, 1.5)) == (
        True,
        {"selective": 2.0, "uniform": 1.5, "selective, decoding alone": 2.0, "batch": 16},
    )
    assert claims.selective_wins(data(2.0, 2.5))[0] is False
    assert claims.selective_wins(data(0.9, 0.5))[0] is False
    assert claims.beats_compiled(data(2.0, 1.5), max)[0] is False
    assert claims.beats_compiled(data(5.0, 1.5), min)[1]["batch"] == 1


def test_a_baseline_that_does_not_count_decides_nothing() -> None:
    def data(counts: bool) -> dict[str, Any]:
        flow = {"method": "flow, selective", "fid": 50.0, "kid": 0.04, "seconds": 1.0}
        return {
            "rows": [flow, {"method": "FastGAN", "fid": 60.0, "kid": 0.05, "seconds": 0.5, "counts": counts}]
        }

    assert claims.beats(data(True), "FastGAN", "fid")[0] is True
    assert claims.beats(data(False), "FastGAN", "fid")[0] is None
    assert claims.beats(data(True), "FastGAN", "seconds")[0] is False


def layers(*means: float) -> list[dict[str, float]]:
    return [{"mean": mean} for mean in means]


@pytest.mark.parametrize(
    ("first", "others", "many", "few"),
    [(15.0, (4.0, 3.0), True, True), (7.9, (4.0, 3.0), False, True), (60.0, (3.0, 9.0), True, False)],
)
def test_sweeps_of_blocks(first: float, others: tuple[float, ...], many: bool, few: bool) -> None:
    plans = {
        "uniform, zeros": {"layers": layers(first, *others)},
        "selective, zeros": {"layers": layers(48.0, *others)},
    }
    assert claims.first_block({"plans": plans})[0] is many
    assert claims.later_blocks({"plans": plans})[0] is few
    # The same rules while a model is trained, at the earliest checkpoint.
    later = {"step": 900, "sweeps": {"layers": layers(1.0, 50.0)}}
    data = {"moments": [{"step": 500, "sweeps": {"layers": layers(first, *others)}}, later]}
    assert claims.early_difference(data)[0] is many
    assert claims.early_redundancy(data) == (few, {"step": 500, "most of the others": max(others)})


@pytest.mark.parametrize(
    ("falls", "holds"), [((True, None, True), True), ((True, False, None), False), ((None, None), None)]
)
def test_ratio_falls(falls: tuple[bool | None, ...], holds: bool | None) -> None:
    assert claims.ratio_falls({"blocks": [{"ratio_falls": fall} for fall in falls]})[0] is holds


@pytest.mark.parametrize(
    ("first", "holds"),
    [
        ({"l2": 9.0, "cosine": 0.7}, True),
        ({"l2": 9.0, "cosine": 0.95}, False),
        ({"l2": 1.0, "cosine": 0.7}, False),
    ],
)
def test_first_layer_deviates(first: dict[str, float], holds: bool) -> None:
    other = {"l2": 2.0, "cosine": 0.9}
    masked = [
        {"o": o, "variant": v, "layers": [first if (o, v) == (5, "attention") else other, other]}
        for o in (1, 2, 5)
        for v in ("attention", "strict")
    ]
    assert claims.first_deviates({"masked": masked})[0] is holds


def test_shares_errors_and_grey_levels_have_their_limits() -> None:
    def shares(first: float) -> dict[str, Any]:
        plan = {"layers": [{"seconds": first}, {"seconds": 1.0}], "total": 4.0, "shares": [0.0, 0.0, 0.3]}
        return {"plans": {"selective": plan, "sequential": plan | {"total": 0.1}}}

    assert claims.first_dominates(shares(2.1))[0] is True
    assert claims.first_dominates(shares(1.9))[0] is False
    for mse, holds in ((0.006, True), (0.008, False)):
        rows = {"selective": {"mse": mse}, "sequential": {"mse": 0.0}}
        assert claims.reconstructs({"rows": rows})[0] is holds
    for grey, holds in ((1.9, True), (2.1, False)):
        data = {
            "rows": [
                {"method": "sequential", "grey_levels": 0.0},
                {"method": "selective", "grey_levels": grey},
            ]
        }
        assert claims.looks_alike(data)[0] is holds


def maf_rows(sweeps: float, cached: float, alike: float = 1.0) -> dict[str, Any]:
    rows = [("sequential, full passes", 1.0), ("sequential, cached", cached), ("sweeps", sweeps)]
    rows += [("sweeps, tau 0.5, from zeros", 99.0)]
    return {"rows": [{"method": m, "speedup": s, "largest": 0.1, "pixels_alike": alike} for m, s in rows]}


def test_mafs() -> None:
    assert claims.maf_faster(maf_rows(11.0, 300.0))[0] is True
    assert claims.maf_faster(maf_rows(9.0, 300.0))[0] is False
    assert claims.maf_beats_cache(maf_rows(11.0, 300.0))[0] is False
    assert claims.maf_beats_cache(maf_rows(400.0, 300.0))[0] is True
    assert claims.digits_alike(maf_rows(11.0, 300.0, alike=0.995))[0] is True
    assert claims.digits_alike(maf_rows(11.0, 300.0, alike=0.985))[0] is False


@pytest.mark.parametrize(("off", "holds"), [(0.0005, True), (-0.0005, True), (0.002, False), (-0.002, False)])
def test_physics_is_judged_by_the_papers_decoder(off: float, holds: bool) -> None:
    data = maf_rows(11.0, 300.0)
    for row, energy in zip(data["rows"][1:], (-0.8, -0.5, -0.8 + off), strict=True):
        row["observed"] = {
            "energy_per_site": energy,
            "energy_per_site_error": 0.001,
            "exact_energy_per_site": -0.81,
        }
    assert claims.ising_same(data)[0] is holds


def test_a_claim_is_about_its_own_models_and_says_what_is_lacking() -> None:
    fast = {"data": maf_rows(11.0, 300.0)}
    ising = {"maf-ising": {"ising-16": fast, "ising-maf": fast}}
    rows = {"rows": [{"method": "flow, selective", "fid": 1.0, "kid": 0.1, "seconds": 1.0}]}
    few = {"generators": {"cifar10-cpu": {"data": rows, "lacking": "no weights of FastGAN"}}}
    told = {claim["name"]: claim["models"] for claim in judge_claims(ising | few)}
    assert list(told["maf-ising-faster"]) == ["ising-maf"]
    assert list(told["maf-ising-cache"]) == ["ising-16", "ising-maf"]
    assert told["generators-gan"]["cifar10-cpu"] == {"missing": "no weights of FastGAN"}


def test_first_guesses_are_judged_by_their_best_runs() -> None:
    def rows(slow: list[float]) -> dict[str, Any]:
        one = {"seconds": 1.0, "runs": [1.0, 1.0], "speedup": 2.0, "sweeps": [63, 3.0, 3.0]}
        mean = sum(slow) / len(slow)
        other = {"seconds": mean, "runs": slow, "speedup": 2.0 / mean, "sweeps": [63, 4.0, 3.0]}
        return {"rows": [one, other]}

    assert claims.any_guess(rows([1.1, 9.0]))[0] is True  # one run met a busy moment
    assert claims.any_guess(rows([1.4, 1.5]))[0] is False


def test_claims_of_items_that_did_not_run_have_no_models() -> None:
    layers = [{"mean": m, "largest": 9, "bound": 63} for m in (6.2, 3.0)]
    plans = {"uniform, zeros": {"layers": layers}, "selective, zeros": {"layers": layers}}
    told = {
        claim["name"]: claim
        for claim in judge_claims({"sweeps": {"cifar10-cpu": {"data": {"plans": plans}}}})
    }
    assert verdict_word(told["first-block"]["models"]["cifar10-cpu"]) == "yes"
    assert told["generators"]["models"] == {}
    assert {c.name for c in CLAIMS if c.ours} == {c["name"] for c in told.values() if c["ours"]}
