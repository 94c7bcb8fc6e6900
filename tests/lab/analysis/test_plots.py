"""Figures can be made of whatever the analyses find; they are looked at by people."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from PIL import Image

from jacobiflow_lab.analysis import plots
from jacobiflow_lab.analysis.convergence import Approach, Convergence, convergence
from jacobiflow_lab.analysis.memory import Memory, Peak
from jacobiflow_lab.analysis.redundancy import redundancy
from jacobiflow_lab.analysis.sweeps import Moment, Progress, sweeps
from subjects import subject


def drawn(path: Path) -> tuple[int, int]:
    """The size of a picture that shows something."""
    with Image.open(path) as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
        return picture.size


def of(*blocks: Approach) -> Convergence:
    return Convergence(samples=1, init="zeros", dtype="float32", blocks=blocks)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_figure_of_any_number_of_blocks(count: int, tmp_path: Path) -> None:
    block = Approach(length=4, jacobi=(1.0, 0.1, 0.0), sequential=(1.0, 0.5, 0.2, 0.0))
    plots.save_convergence(of(*[block] * count), tmp_path / "a.png", title="a title")
    plots.save_ratios(of(*[block] * count), tmp_path / "b.png", title="a title")
    width, height = drawn(tmp_path / "a.png")
    assert width == pytest.approx(3.8 * plots.DPI * {1: 1, 4: 2, 5: 3}[count], abs=2)
    assert height == pytest.approx(2.8 * plots.DPI * (2 if count > 1 else 1), abs=2)
    drawn(tmp_path / "b.png")


@pytest.mark.parametrize("steps", [(0.0,), (0.0, 0.0), (math.nan, math.nan), (math.inf, 1.0, 0.0), (1e-30, 1e30)])
def test_a_figure_of_odd_numbers(steps: tuple[float, ...], tmp_path: Path) -> None:
    odd = of(*[Approach(length=len(steps), jacobi=steps, sequential=steps)] * 2)
    for draw in (plots.save_convergence, plots.save_ratios):
        draw(odd, tmp_path / "a.png", title="100% $odd_\\frac{$ names")
        assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["tarflow", "maf-affine"])
def test_figures_of_what_was_measured(name: str, tmp_path: Path) -> None:
    s = subject(name)
    z = s.flow.noise(3, seed=0)
    found = redundancy(s.flow, z)
    plots.save_redundancy(found, tmp_path / "redundancy.png", title=name)
    columns, rows = 3, 2 if name == "tarflow" else 1
    assert drawn(tmp_path / "redundancy.png") == pytest.approx(
        (3.9 * plots.DPI * columns, 3.1 * plots.DPI * rows), abs=2
    )
    if name == "tarflow":
        plots.save_masked(found, tmp_path / "masked.png", variant="strict", title=name)
        drawn(tmp_path / "masked.png")
    counted = [sweeps(s.flow, z, plan) for plan in ("uniform", "selective")]
    plots.save_sweeps(counted, tmp_path / "sweeps.png", title=name)
    drawn(tmp_path / "sweeps.png")
    moments = tuple(Moment(step=k, sweeps=counted[0]) for k in (1, 10))
    plots.save_progress(Progress(moments=moments), tmp_path / "progress.png", title=name)
    drawn(tmp_path / "progress.png")
    plots.save_convergence(convergence(s.flow, z), tmp_path / "convergence.png", title=name)
    drawn(tmp_path / "convergence.png")


def test_figures_of_costs(tmp_path: Path) -> None:
    layers = [{"seconds": 1.0, "sweeps": 3.0}] * 9
    one = {"plan": "uniform", "batch": 4, "layers": layers, "other": 0.4, "whole": 9.4}
    plots.save_runtime([one, one], tmp_path / "runtime.png", title="time")
    drawn(tmp_path / "runtime.png")
    peak = Peak(plan="uniform", cache="all", peak=1 << 22, base=1 << 28, measure="resident")
    plots.save_memory(Memory(batch=4, peaks=(peak,) * 3), tmp_path / "memory.png", title="memory")
    drawn(tmp_path / "memory.png")


def test_figures_of_the_report(tmp_path: Path) -> None:
    panels = {"FID": [9.0, 9.1, 10.0], "paired": [0.0, 0.1, 0.4]}
    for seconds in ([2.0, 1.0, 0.5], []):
        plots.save_against_tau(tmp_path / "tau.png", [0.5, 2.0], panels, seconds, title="tau", mark=0.5)
        drawn(tmp_path / "tau.png")
    bars = [("seconds", ["a", "b"], {"one": [1.0, 2.0], "two": [2.0, 3.0]})]
    plots.save_bars(tmp_path / "bars.png", bars, title="bars")
    drawn(tmp_path / "bars.png")
    lines = {"one": [1.0, 10.0], "two": [2.0, 30.0]}
    plots.save_lines(tmp_path / "lines.png", [64, 256], lines, title="L", labels=("L", "MiB"), log=True)
    drawn(tmp_path / "lines.png")


def test_times_of_any_size_are_on_the_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    seconds = [7.0, 5.0, 2.0]
    plots.save_against_tau(tmp_path / "tau.png", [0.5, 2.0], {"FID": [9.0, 9.1, 10.0]}, seconds, title="", mark=0.5)
    bottom, top = figures[0].axes[1].get_ylim()
    assert bottom == 0
    assert top > 7


def test_the_style_is_left_behind(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    block = Approach(length=2, jacobi=(1.0, 0.1), sequential=(1.0, 0.0))
    plots.save_convergence(of(block), tmp_path / "a.png", title="")
    assert dict(matplotlib.rcParams) == before
