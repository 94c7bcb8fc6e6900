"""One job or training a folder: the first process locks it alone; those of a job then share the lock."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path
from types import TracebackType

from jacobiflow.core.types import JacobiflowError

FILE = ".lock"
WAIT = 3.0  # seconds that processes of a killed job may take to vanish
UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of file systems without locks


class LockError(JacobiflowError):
    """A folder that somebody else works in."""


class Lock:
    """The system takes the lock away when its process ends, however it ends: none is ever stale."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # a link could lead to anything
        self.file = open(os.open(folder / FILE, flags, 0o666), "a+", encoding="utf-8")  # noqa: SIM115

    def alone(self) -> None:
        """No other job is here, and none can come: refuse otherwise."""
        ending = time.monotonic() + WAIT
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() > ending:
                self.file.seek(0)
                who = self.file.read(200).strip() or "another process"
                raise LockError(f"{self.folder} is in use by {who}: wait for it, or use another --out")
            time.sleep(0.05)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()

    def together(self) -> None:
        """The other processes of this job may take part; no other job can come."""
        if not self._try(fcntl.LOCK_SH):
            raise LockError(f"{self.folder} is in use by another job: wait for it, or use another --out")

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNKNOWN:
                raise
            warnings.warn(f"{self.folder} is on a file system without locks: run one job there", stacklevel=3)
        return True

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
