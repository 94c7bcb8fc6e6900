"""Which way is the fastest? Measured once per shape, number of rows, mode and number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

ORIGINAL = "original"
MARGIN = 1.2  # by which the original must be beaten: calling ours has a cost of its own
REPEATS, SHORT_SECONDS = 5, 0.01  # shorter runs are repeated, because noise decides them
PATIENCE_SECONDS = 0.1  # originals that take longer are estimated from one pass
AGAIN = (100, 10_000)  # calls after which it is measured again: weights may have changed meanwhile

Work = Callable[[], object]
_winners: dict[Hashable, str] = {}
_calls: dict[Hashable, int] = {}
clock = time.perf_counter


def winner(key: Hashable) -> str | None:
    """The way that has won; None: it must be measured now."""
    _calls[key] = _calls.get(key, 0) + 1
    return None if _calls[key] in AGAIN else _winners.get(key)


def run(key: Hashable, ways: Mapping[str, Work], original: Work, one_pass: Work, passes: int) -> str:
    """The fastest of our ways or the original, remembered under `key`.

    One run of each way and one pass of the original decide clear cases, unless they are short: then calls cost as
    much as passes, and only the original itself tells. In others all runs are repeated.
    """
    seconds = {name: _best(work, 1) for name, work in ways.items()}
    ours = min(seconds, key=seconds.__getitem__)
    theirs = passes * _best(one_pass, 1)
    if theirs < SHORT_SECONDS or 2 * seconds[ours] > theirs:
        short = theirs < PATIENCE_SECONDS
        seconds = {name: _best(work, REPEATS) for name, work in ways.items()}
        ours = min(seconds, key=seconds.__getitem__)
        theirs = _best(original, REPEATS) if short else passes * _best(one_pass, REPEATS)
    _winners[key] = ours if MARGIN * seconds[ours] < theirs else ORIGINAL
    return _winners[key]


def _best(work: Work, repeats: int) -> float:
    """Seconds of the shortest run. Long ones are not repeated."""
    times = list[float]()
    while len(times) < repeats and (not times or times[0] < SHORT_SECONDS):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)
