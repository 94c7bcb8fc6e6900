"""Who is on the page now, and how the work for a visitor is reported and ended."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from jacobiflow.flows.cost_model import Clock
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.tune import clock_of
from jacobiflow_lab.app.models import UserError

MAX_VISITORS = 50  # sessions at a time
MAX_WAITING = MAX_VISITORS  # requests in line
CONNECT_SECONDS = 5.0  # from a session's request until it listens for the answer


class VisitorLeft(UserError):
    """Nobody waits for this result."""


class Visitors:
    """The sessions that have a connection open, or that sent a request a moment ago.

    >>> visitors = Visitors(limit=1)
    >>> visitors.admit("a"), visitors.admit("b")
    (True, False)
    >>> with visitors.connected("a"):
    ...     visitors.check("a")
    >>> visitors.check("a")
    Traceback (most recent call last):
    jacobiflow_lab.app.visitors.VisitorLeft: the visitor has left
    """

    def __init__(self, limit: int = MAX_VISITORS) -> None:
        self.limit = limit
        self._open: Counter[str] = Counter()  # connections per session
        self._until: dict[str, float] = {}  # when the place of a session without a connection ends
        self._lock = threading.Lock()

    def admit(self, session: str) -> bool:
        """Whether there is room for this session. It has a few seconds to connect."""
        with self._lock:
            here = self._here()
            if session not in here and len(here) >= self.limit:
                return False
            self._until[session] = time.monotonic() + CONNECT_SECONDS
            return True

    @contextmanager
    def connected(self, session: str) -> Iterator[None]:
        """A connection of an admitted session, while it is open."""
        with self._lock:
            self._open[session] += 1
            self._until.pop(session, None)
        try:
            yield
        finally:
            with self._lock:
                self._open[session] -= 1

    def check(self, session: str | None) -> None:
        """Raise VisitorLeft unless the session is here."""
        with self._lock:
            if session not in self._here():
                raise VisitorLeft("the visitor has left")

    def _here(self) -> set[str]:
        """The sessions now. Those that left are forgotten."""
        now = time.monotonic()
        self._open = +self._open
        self._until = {session: until for session, until in self._until.items() if until > now}
        return {*self._open, *self._until}


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Reports progress, and ends the work when nobody waits for its result: both functions may raise."""

    report: Callable[[float, str], None] = lambda share, text: None  # share done, what is being done
    check: Callable[[], None] = lambda: None  # called often, between measurements

    def steps(self, total: int) -> Callable[[str], None]:
        """A function that reports the start of each of `total` steps."""
        done = count()

        def start(text: str) -> None:
            self.report(min(next(done) / total, 0.99), text)

        return start

    def clock(self, flow: Flow) -> Clock:
        """The clock that tuning reads before and after each measurement. Each reading is a check."""
        seconds = clock_of(next(flow.parameters()).device)

        def read() -> float:
            self.check()
            return seconds()

        return read
