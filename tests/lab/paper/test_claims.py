"""Verdicts on the claims: each can hold, fail and be open, and the paper's own numbers pass each rule."""

from __future__ import annotations

from typing import Any

import pytest

from jacobiflow_lab.paper.claims import CLAIMS, Claim, judge, judge_claims, verdict_word, why_open

BY_NAME = {claim.name: claim for claim in CLAIMS}


def outcome(name: str, numbers: dict[str, Any]) -> bool | None:
    return BY_NAME[name].decide(numbers)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_papers_own_numbers_pass_the_rule(claim: Claim) -> None:
    assert bool(claim.printed) is not bool(claim.unprinted)  # or it says why there are none
    for numbers in claim.printed:
        assert claim.decide(numbers) is True, numbers
    assert "{" not in claim.holds_if


def test_every_claim_has_a_name_of_its_own_and_numbers_for_its_tests() -> None:
    assert len(BY_NAME) == len(CLAIMS)
    for claim in CLAIMS:
        assert len(claim.outcomes(dict.fromkeys(claim.numbers, 1.0))) == len(claim.tests)


def sweeps(*means: float) -> dict[str, float]:
    """As the file names them."""
    found = {"first block": means[0], "second block": means[1], "most after the first": max(means[1:])}
    later = max(means[2:], default=0.0)
    return found | {
        "median after the first": sorted(means[1:])[(len(means) - 1) // 2],
        "most after the second": later,
        "standard error": 0.1,
    }


TIMES = {"sequential": 9.0, "uniform": 4.0, "selective": 3.0, "±": 0.1}
FLOW = {"flow": 10.0, "DDIM, 20 steps": 20.0, "FastGAN": 12.0, "counts": True} | dict.fromkeys(
    ("± flow", "± DDIM, 20 steps", "± FastGAN"), 0.25
)


@pytest.mark.parametrize(
    ("name", "holds", "fails", "open_"),
    [
        ("faster", TIMES, TIMES | {"selective": 9.5}, TIMES | {"selective": 8.95}),
        ("faster-small-batch-compiled", TIMES, TIMES | {"selective": 9.5}, TIMES | {"selective": 8.95}),
        ("beats-uniform", TIMES, TIMES | {"uniform": 2.0}, TIMES | {"uniform": 3.05}),
        ("uniform-faster", TIMES, TIMES | {"uniform": 9.5}, TIMES | {"uniform": 9.05}),
        ("uniform-loses", {"loses above": 400}, {"loses above": 900}, {"loses above": 520}),
        (
            "equal-blocks",
            {"fastest": 1.0, "slowest": 1.05},
            {"fastest": 1.0, "slowest": 1.2},
            {"fastest": 1.0, "slowest": 1.11},
        ),
        (
            "first-dominates",
            {"share of the first block": 0.6},
            {"share of the first block": 0.4},
            {"share of the first block": 0.505},
        ),
        (
            "quality",
            {"FID change": 0.05, "± FID": 0.005, "KID change": 0.02, "± KID": 0.03},
            {"FID change": 0.01, "± FID": 0.005, "KID change": 0.1, "± KID": 0.03},
            {"FID change": 0.05, "± FID": 0.02},
        ),
        (
            "worse-above",
            {"FID change": 0.05, "± FID": 0.01},
            {"FID change": -0.05, "± FID": 0.01},
            {"FID change": 0.005, "± FID": 0.01},
        ),
        ("brisque", {"change": 0.4, "±": 0.4}, {"change": 3.0, "±": 0.4}, {"change": 0.8, "±": 0.4}),
        (
            "first-guess",
            {"fastest": 1.0, "slowest": 1.1, "±": 0.05},
            {"fastest": 1.0, "slowest": 1.5, "±": 0.05},
            {"fastest": 1.0, "slowest": 1.24, "±": 0.05},
        ),
        (
            "first-block",
            sweeps(15.0, 4.0, 3.0),
            sweeps(7.0, 4.0, 3.0),
            sweeps(8.1, 4.0, 3.0),
        ),
        (
            "later-blocks",  # one block may stand out, as the paper's second one does
            sweeps(60.0, 50.0, 3.0, 4.0),
            sweeps(60.0, 9.0, 9.0, 9.0),
            sweeps(60.0, 8.1, 8.1, 8.1),
        ),
        (
            "second-block",
            sweeps(60.0, 50.0, 3.0),
            sweeps(60.0, 4.0, 3.0),
            sweeps(60.0, 6.1, 3.0),
        ),
        (
            "undertrained",
            sweeps(9.0, 5.0),
            sweeps(9.0, 9.0),
            sweeps(9.0, 8.05),
        ),
        (
            "superlinear",
            {"blocks where it falls": 3, "blocks with enough sweeps": 3},
            {"blocks where it falls": 2, "blocks with enough sweeps": 3},
            {"blocks where it falls": 0, "blocks with enough sweeps": 0},
        ),
        (
            "first-layer-deviates",
            {
                "L2, first": 9.0,
                "L2, others": 2.0,
                "cosine, first": 0.7,
                "cosine, others": 0.9,
                "standard error": 0.25,
            },
            {
                "L2, first": 9.0,
                "L2, others": 2.0,
                "cosine, first": 0.95,
                "cosine, others": 0.9,
                "standard error": 0.25,
            },
            {
                "L2, first": 2.1,
                "L2, others": 2.0,
                "cosine, first": 0.7,
                "cosine, others": 0.9,
                "standard error": 0.25,
            },
        ),
        (
            "still-pictures",
            {"o = 1": 0.2, "o = 2": 0.4, "o = 5": 0.8, "standard error": 0.025},
            {"o = 1": 0.2, "o = 2": 0.4, "o = 5": 1.2, "standard error": 0.025},
            {"o = 1": 0.38, "o = 2": 0.4, "o = 5": 0.8, "standard error": 0.025},
        ),
        (
            "memory",
            {"selective": 3.0, "sequential": 5.0},
            {"selective": 6.0, "sequential": 5.0},
            {"selective": 5.05, "sequential": 5.0},
        ),
        ("memory-length", {"longest": 0.8}, {"shortest": 0.7, "longest": 1.1}, {"longest": 1.01}),
        (
            "reconstruction",
            {"mean squared error": 0.006, "standard error": 0.00025},
            {"mean squared error": 0.009, "standard error": 0.00025},
            {"mean squared error": 0.0069, "standard error": 0.00025},
        ),
        ("maf-mnist", {"speed-up": 11.0}, {"speed-up": 9.0}, {"speed-up": 10.1}),
        ("maf-mnist-alike", {"pixels alike": 0.995}, {"pixels alike": 0.985}, {"pixels alike": 0.9905}),
        (
            "maf-mnist-cache",
            {"sweeps": 400.0, "sequential, cached": 300.0},
            {"sweeps": 11.0, "sequential, cached": 300.0},
            {"sweeps": 300.0, "sequential, cached": 301.0},
        ),
        (
            "maf-ising",
            {"difference": 0.0005, "standard error": 0.001},
            {"difference": 0.01, "standard error": 0.001},
            {"difference": 0.0042, "standard error": 0.001},
        ),
        ("generators", FLOW, FLOW | {"flow": 30.0}, FLOW | {"counts": False}),
        ("generators-gan", FLOW, FLOW | {"flow": 14.0}, FLOW | {"flow": 13.0}),
        ("ddim-faster", FLOW | {"flow": 30.0}, FLOW, FLOW | {"flow": 20.1}),
    ],
)
def test_a_rule_can_hold_fail_and_be_open(name: str, holds: Any, fails: Any, open_: Any) -> None:
    assert outcome(name, holds) is True
    assert outcome(name, fails) is False
    assert outcome(name, open_) is None


@pytest.mark.parametrize(("most", "left", "holds"), [(8, 1e-12, True), (9, 1e-12, False), (8, 1e-3, False)])
def test_bounded(most: int, left: float, holds: bool) -> None:
    data = {"most_sweeps": most, "error_left": left, "blocks": [{"length": 8}]}
    found = judge(BY_NAME["bounded"], {"data": data})
    assert found["holds"] is holds
    assert found["numbers"] == {"most sweeps": most, "L": 8, "error left": left}
    assert bool(found["reason"]) is not holds


def test_deviations_of_runs_are_below_differences_of_methods() -> None:
    assert outcome("runs-agree", {"±": 0.1, "smallest difference": 1.0}) is True
    assert outcome("runs-agree", {"±": 1.5, "smallest difference": 1.0}) is False


def test_an_open_verdict_says_how_much_would_decide_it() -> None:
    assert why_open([(1.0, 1.1, 0.2)]) == (
        "1 and 1.1 are closer than the uncertainty of 0.2 at this sample size. "
        "About 4 times as many samples would decide it."
    )
    assert "too little" in why_open([])


def test_a_slow_method_is_tested_at_the_other_batch() -> None:
    def times(batch: int, selective: float) -> dict[str, float]:
        seconds = {"sequential": 2.0, "uniform": 1.9, "selective": selective, "spread": 0.01}
        return seconds | {"batch": batch, "speedup": 2.0 / selective}

    sizes = {"smallest": times(1, 2.5), "largest": times(16, 4.0)}
    data = {
        "K": 4,
        "times": {"torch": {"smallest": times(1, 0.5), "largest": times(16, 1.0)}, "compiled": sizes},
    }
    found = judge(BY_NAME["faster"], {"data": data})
    assert found["holds"] is True
    assert found["numbers"]["speed-up"] == 2.0
    assert found["numbers"]["K"] == 4
    assert judge(BY_NAME["faster-small-batch"], {"data": data})["numbers"]["speed-up"] == 4.0
    slow = judge(BY_NAME["faster-compiled"], {"data": data})
    assert slow["holds"] is False
    assert "Tested at batch 1: the speed-up is 0.80x there and 0.50x here." in slow["reason"]


def test_quality_that_falls_is_tested_with_another_first_guess() -> None:
    change = {"fid": {"value": 0.2, "half": 0.1}, "kid": None}
    rows = {"selective": {"change": change, "paired_relative": 0.5}}
    data = {"quality": rows | {"selective, from input": {"paired_relative": 0.125}}}
    found = judge(BY_NAME["quality"], {"data": data})
    assert found["holds"] is False
    assert found["numbers"] == {"FID change": 0.2, "± FID": 0.1}
    assert "the paired distance is 0.125 instead of 0.5" in found["reason"]


def maf_rows(sweeps: float, cached: float) -> dict[str, Any]:
    rows = [("sequential, full passes", 1.0), ("sequential, cached", cached), ("sweeps", sweeps)]
    return {"rows": [{"method": m, "speedup": s} for m, s in rows]}


def test_a_claim_is_about_its_own_models_and_says_what_is_lacking() -> None:
    fast = {"data": maf_rows(11.0, 300.0)}
    ising = {"maf-ising": {"ising-16": fast, "ising-maf": fast}}
    rows = {"rows": [{"method": "flow, selective", "fid": 1.0, "fid_spread": 0.0}]}
    few = {"generators": {"cifar10-cpu": {"data": rows, "lacking": "no weights of FastGAN"}}}
    told = {claim["name"]: claim["models"] for claim in judge_claims(ising | few)}
    assert list(told["maf-ising-faster"]) == ["ising-maf"]
    assert list(told["maf-ising-cache"]) == ["ising-16", "ising-maf"]
    assert told["generators-gan"]["cifar10-cpu"] == {"missing": "no weights of FastGAN"}


def test_claims_of_items_that_did_not_run_have_no_models() -> None:
    plans = {"uniform, zeros": {"first": 7.2, "most": 3.0, "error": 0.1}}
    told = {c["name"]: c for c in judge_claims({"sweeps": {"cifar10-cpu": {"data": {"plans": plans}}}})}
    assert verdict_word(told["first-block"]["models"]["cifar10-cpu"]) == "holds"
    assert told["generators"]["models"] == {}
    assert {c.name for c in CLAIMS if c.ours} == {c["name"] for c in told.values() if c["ours"]}
