"""Progress: what is done, and how long the rest takes."""

from __future__ import annotations

import io
import re
import sys

import pytest

from jacobiflow.core import progress


def test_steps_that_are_counted_tell_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    show = progress.with_estimate(said.append)
    for seconds, text in (
        (0.0, "block 1 of 4"),
        (10.0, "block 2 of 4"),
        (30.0, "block 3 of 4"),
        (30.0, "run 1 of at most 9: auto"),  # another count begins
        (32.0, "run 2 of at most 9: auto"),
        (32.0, "exact answers"),
        (32.1, "run 9 of at most 9: auto"),  # under a second is not worth saying
    ):
        now[0] = seconds
        show(text)
    assert said == [
        "block 1 of 4",
        "block 2 of 4, 30 s left",
        "block 3 of 4, 30 s left",
        "run 1 of at most 9: auto",
        "run 2 of at most 9: auto, 16 s left",
        "exact answers",
        "run 9 of at most 9: auto",
    ]


@pytest.mark.parametrize(("seconds", "words"), [(0.01, "100 samples per s"), (1.42, "1.42 s per sample")])
@pytest.mark.parametrize("terminal", [False, True])
def test_the_pace_in_words(monkeypatch: pytest.MonkeyPatch, terminal: bool, seconds: float, words: str) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bar = progress.progress_bar(total=3000, unit="sample", initial=10)
    bar.n, bar.start_t = 30, bar._time() - 20 * seconds
    text = str(bar)
    bar.disable = True
    line = rf"30/3000 \[[\d:]+<[\d:]+, {words}\]$" if terminal else rf"^30 of 3000 samples, {words}, [\d:]+ left$"
    assert re.search(line, text)


def test_without_a_terminal_a_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.steps("timing") as show:
        for text in ("run 1 of 2: a", "run 1 of 2: b", "run 2 of 2: a", "the end"):
            show(text)
    assert capsys.readouterr().err.splitlines() == [
        "timing run 1 of 2: a",
        "timing run 2 of 2: a",
        "timing the end",
    ]


def test_what_takes_long_is_announced_once_and_on_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.announce("compiling for a test")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in range(2):
        progress.announce("compiling for another test")
    assert capsys.readouterr().err == "compiling for another test\n"
