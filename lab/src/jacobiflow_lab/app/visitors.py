"""Who is on the page now, and whether somebody still waits for a result."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jacobiflow_lab.app.models import Refused

VISITORS = 50  # sessions at once
WAITING = 20  # requests in line, of all visitors
CONNECT_SECONDS = 5.0  # from a session's request until it listens for the answer


class Left(Refused):
    """Nobody waits for this result any more."""


class Visitors:
    """The sessions that have a connection open, or that asked for something a moment ago.

    >>> visitors = Visitors(limit=1)
    >>> visitors.admit("a"), visitors.admit("b")
    (True, False)
    >>> with visitors.connected("a"):
    ...     visitors.check("a")
    >>> visitors.check("a")
    Traceback (most recent call last):
    jacobiflow_lab.app.visitors.Left: the visitor has left
    """

    def __init__(self, limit: int = VISITORS) -> None:
        self.limit = limit
        self._open: Counter[str] = Counter()  # connections per session
        self._expected: dict[str, float] = {}  # when a session without a connection is given up
        self._lock = threading.Lock()

    def admit(self, session: str) -> bool:
        """Whether there is room for this session. It has a few seconds to connect."""
        now = time.monotonic()
        with self._lock:
            self._expected = {s: until for s, until in self._expected.items() if until > now}
            here = self._open.keys() | self._expected.keys()
            if session not in here and len(here) >= self.limit:
                return False
            self._expected[session] = now + CONNECT_SECONDS
            return True

    @contextmanager
    def connected(self, session: str) -> Iterator[None]:
        """A connection of an admitted session, while it is open."""
        with self._lock:
            self._open[session] += 1
            self._expected.pop(session, None)
        try:
            yield
        finally:
            with self._lock:
                self._open[session] -= 1
                if not self._open[session]:
                    del self._open[session]

    def check(self, session: str | None) -> None:
        """Raise Left unless the session is here."""
        with self._lock:
            here = session in self._open or self._expected.get(session or "", 0.0) > time.monotonic()
        if not here:
            raise Left("the visitor has left")
