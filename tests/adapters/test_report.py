"""What is found in any object, and what is said about it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pyro.nn
import pytest
import torch
import zuko
from nflows.distributions.mixture import MADEMoG
from nflows.transforms import CompositeTransform
from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
from pyro.distributions import transforms as pyro_t
from torch import Tensor, nn

import jacobiflow as jf
from adapters.foreign_flows import CASES, D, perturb
from jacobiflow.adapters import patch, walk


def affine(**options: Any) -> Any:
    torch.manual_seed(0)
    return perturb(MaskedAffineAutoregressiveTransform(D, 24, **options))


class Plain:
    """Any object with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots:
    __slots__ = ("flow", "unset")

    def __init__(self, flow: Any) -> None:
        self.flow = flow


class Touchy(Plain):
    """Looking at it in any other way than at what it stores is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def lazy(self) -> Any:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


class Lightning(nn.Module):
    """A module that is handed to a trainer, which refers back to it."""

    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.flow, self.trainer = flow, Plain()
        self.trainer.lightning_module = self


def in_closure(flow: Any) -> Callable[[Tensor], Any]:
    def density(x: Tensor) -> Any:
        return flow(x), later

    if flow is None:
        later = 0
    return density


OBJECTS: dict[str, tuple[Callable[[Any], Any], str]] = {  # how a flow is held, and its path
    "a sampler": (lambda f: Plain(flow=Plain(flow=f), history=[{"x": 1.0}] * 9), ".flow.flow"),
    "a plugin": (lambda f: Plain(model=Plain(nets={"flow": [None, f]})), ".model.nets['flow'][1]"),
    "slots": (Slots, ".flow"),
    "a module with a trainer": (Lightning, ".flow"),
    "a closure": (in_closure, "<flow>"),
    "a bound method": (lambda f: f.inverse, ".__self__"),
    "a partial": (lambda f: functools.partial(print, f, end=""), ".args[0]"),
    "a touchy object": (lambda f: Touchy(flow=f), ".flow"),
    "a set of tuples": (lambda f: {(1, f)}, "[0][1]"),
    "a module in a list": (lambda f: nn.Sequential(nn.ReLU(), f), ".1"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_any_object_is_searched(name: str, sweeps: list[Any]) -> None:
    hold, path = OBJECTS[name]
    flow = affine()
    model = hold(flow)
    modules = set(sys.modules)
    assert jf.accelerate(model) is model
    assert set(sys.modules) == modules
    with torch.no_grad():
        flow.inverse(torch.randn(7, D))
    assert len(sweeps) == 1
    (entry,) = jf.acceleration(model).entries
    assert (entry.path, entry.kind) == (path, "MaskedAffineAutoregressiveTransform")
    jf.restore(model)
    assert "inverse" not in vars(flow)


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Plain(data=list(map(str, range(200))), rows=[[i] for i in range(200)])
    holder.rows.append(holder)
    assert len(list(walk.walk(holder))) == 203
    monkeypatch.setattr(walk, "MOST", 50)
    far, near = affine(), affine()
    holder.rows.append(Plain(flow=far))
    holder.flow = near
    with pytest.warns(UserWarning, match="Plain holds more than 50 objects, the others were not searched"):
        jf.accelerate(holder)
    assert "inverse" in vars(near)
    assert "inverse" not in vars(far)


def test_a_flow_that_is_made_later_is_asked_for() -> None:
    with pytest.raises(jf.AccelerationError, match=r"; inner\.model are None: accelerate again when the flow"):
        jf.accelerate(Plain(inner=Plain(model=None), size=3))


def test_the_report_counts_what_ran(sweeps: list[Any]) -> None:
    kernels = affine()
    own = CASES["nflows-affine-own-activation"].model(0, torch.float32)
    flow = CompositeTransform([kernels, own])
    before = jf.acceleration(flow)
    assert [(e.runs, e.why) for e in before.entries] == [("original", "not accelerated: call jf.accelerate")] * 2
    jf.accelerate(flow)
    with torch.no_grad():
        for n in (5, 6):
            flow.inverse(torch.randn(n, D))
        with torch.autocast("cpu", torch.bfloat16):
            kernels.inverse(torch.randn(4, D))
            assert jf.acceleration(flow).entries[0].why == "autocast"
    first, second = jf.acceleration(flow).entries
    assert first.calls == {"C kernels": 2, "original": 1}
    assert second.calls == {"full sweeps": 2}
    assert (first.path, second.path) == ("._transforms.0", "._transforms.1")
    assert first.rows == second.rows == 11
    assert first.passes_saved == 18  # 10 passes twice; ours evaluates 9 of 10 positions
    by_sweeps = [out for out in sweeps if out.stats.blocks[0].backend == "torch"]
    assert second.passes_saved == 2 * D - sum(int(out.stats.blocks[0].sweeps.max()) for out in by_sweeps)
    assert second.why == "its activation or connections are not known: each sweep is a full pass"
    assert second.runs == "full sweeps"


WHY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hooks": (lambda m: m.autoregressive_net.register_forward_hook(print), "hooks or a replaced forward"),
    "dropout": (lambda m: m.train(), "train mode with dropout or batch norm"),
    "float64": (lambda m: m.double(), "no C kernel for torch.float64 on cpu"),
}


@pytest.mark.parametrize("name", WHY)
def test_the_report_says_why_nothing_faster_runs(name: str) -> None:
    change, why = WHY[name]
    model = jf.accelerate(affine(dropout_probability=0.3).eval())
    report = jf.acceleration(model)
    assert (report.entries[0].runs, "faster" in repr(report)) == ("C kernels", False)
    change(model)
    report = jf.acceleration(model)
    assert (report.entries[0].why.startswith(why), "faster" in repr(report)) == (True, True)


def test_transforms_that_are_made_per_call_are_counted_where_they_are_made(sweeps: list[Any]) -> None:
    flow = jf.accelerate(zuko.flows.MAF(D, 3, transforms=2))
    with torch.no_grad():
        flow(torch.randn(4, 3)).sample((5,))
        flow(torch.randn(3)).sample((2,))
    entries = jf.acceleration(flow).entries
    assert [e.path for e in entries] == [".transform.transforms.0", ".transform.transforms.1"]
    assert all(e.rows == 22 for e in entries)
    assert all(e.calls == {"C kernels": 2} for e in entries)


def test_the_report_is_a_table(sweeps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = jf.accelerate(affine())
    with torch.no_grad():
        model.inverse(torch.randn(1200, D))
    report = jf.acceleration(model)
    lines = str(report).splitlines()
    rule = next(i for i, line in enumerate(lines) if line[0] == "-")
    rows = [line.split() for line in lines[rule + 1 :]]
    assert lines[0].split()[0] == "transform"
    assert rows == [
        ["(itself)", "MaskedAffine...iveTransform", "C", "kernels", "1", "C", "kernels", "1,200", "9"],
    ]
    assert repr(report) == str(report)  # what a notebook shows
    assert str(jf.acceleration(nn.ReLU())) == "ReLU: no autoregressive transform"


def test_the_report_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = Plain(neural_net_of_a_posterior=nn.Sequential(nn.ReLU(), affine()))
    assert max(map(len, str(jf.acceleration(model)).splitlines())) <= 80
    assert jf.acceleration(model).entries[0].kind == "MaskedAffineAutoregressiveTransform"  # in full


def test_what_is_not_covered_is_named_once() -> None:
    """In a warning of `accelerate`, and in the report."""
    neural = pyro_t.NeuralAutoregressive(pyro.nn.AutoRegressiveNN(D, [16], param_dims=[8] * 3), 8)
    flow = nn.ModuleList([affine(), neural])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jf.accelerate(flow)
    assert len(caught) == 1
    assert "1 NeuralAutoregressive: its structure is not known" in str(caught[0].message)
    entry = jf.acceleration(flow).entries[1]
    assert (entry.path, entry.kind, entry.runs) == (".1", "NeuralAutoregressive", "original")
    with pytest.raises(jf.AccelerationError, match="1 NeuralAutoregressive: its structure"):
        jf.accelerate(neural)


def test_a_mixture_of_gaussians_is_no_transform() -> None:
    """What sbi calls `made`."""
    mixture = MADEMoG(features=D, hidden_features=16, context_features=None)
    with pytest.raises(jf.AccelerationError, match="a distribution that is sampled feature by feature"):
        jf.accelerate(mixture)
    (entry,) = jf.acceleration(mixture).entries
    assert entry.kind == "MixtureOfGaussiansMADE"
    assert "no inverse to solve" in entry.why


def test_the_original_runs_where_it_is_as_fast(decoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once for each power of two of rows, with and without gradients."""
    asked: list[Any] = []

    def run(key: Any, ways: Any, *rest: Any) -> str:
        asked.append(key)
        won = patch.ORIGINAL if key[2] or key[1] < 4 else next(iter(ways))
        patch._kinds[key][1] = won
        return won

    monkeypatch.setattr(patch, "race", run)
    monkeypatch.setattr(patch, "_kinds", defaultdict(lambda: [0, None]))
    model = jf.accelerate(affine())
    for n in (3, 3, 9, 15, 3):
        with torch.no_grad():
            model.inverse(torch.randn(n, D))
    assert [len(out.x) for out in decoded] == [9, 15]
    x, _ = model.inverse(torch.randn(9, D))
    assert x.requires_grad
    assert len(decoded) == 2
    assert [(key[1], key[2]) for key in asked] == [(2, False), (4, False), (4, True)]
    (entry,) = jf.acceleration(model).entries
    assert entry.calls == {"original": 4, "C kernels": 2}
    assert (entry.runs, entry.why) == ("original", "it is as fast with gradients")


@pytest.mark.parametrize(
    ("ours", "one_pass", "original", "won", "runs"),
    [
        (1, 1, 10, "ours", {"ours": 1, "one pass": 1}),  # clear: the original is not run
        (9, 1, 9.9, "original", {"ours": 6, "one pass": 1, "original": 5}),  # no gain worth it
        (8, 1, 9.9, "ours", {"ours": 6, "one pass": 1, "original": 5}),
        (30, 1, 50, "ours", {"ours": 2, "one pass": 1, "original": 1}),  # a pass told too little
        (0.4, 0.1, 0.26, "original", {"ours": 6, "one pass": 1, "original": 5}),  # short: a pass costs a call
        (190, 20, 10**9, "original", {"ours": 2, "one pass": 2}),  # 10 passes take too long to be tried
    ],
)
def test_the_race(
    ours: float,
    one_pass: float,
    original: float,
    won: str,
    runs: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, count = [0.0], dict[str, int]()

    def work(name: str, milliseconds: float) -> patch.Work:
        def once() -> None:
            now[0] += milliseconds / 1000
            count[name] = count.get(name, 0) + 1

        return once

    monkeypatch.setattr(patch, "clock", lambda: now[0])
    monkeypatch.setattr(patch, "_kinds", defaultdict(lambda: [0, None]))
    assert patch.winner("key") is None
    found = patch.race("key", {"ours": work("ours", ours)}, work("original", original), work("one pass", one_pass), 10)
    assert (found, count) == (won, runs)
    assert [patch.winner("key") for _ in range(99)] == [won] * 98 + [None]  # the hundredth call measures again
