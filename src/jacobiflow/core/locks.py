"""One job or training per folder: the first process locks it exclusively, then a job's processes share it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path

from jacobiflow.core.results import JacobiflowError

FILE = ".lock"
WAIT = 3.0  # seconds that the processes of a killed job may need to end
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # errors of file systems without locks


class LockError(JacobiflowError):
    """A folder that another process uses."""


class Lock:
    """A lock on a folder. The system releases it when its process ends, so it is never stale."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # a link could point to any file
        self.file = open(os.open(folder / FILE, flags, 0o666), "a+", encoding="utf-8")  # noqa: SIM115

    def exclusive(self) -> None:
        """Lock exclusively; LockError if another job uses the folder."""
        deadline = time.monotonic() + WAIT
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self.file.seek(0)
                owner = self.file.read(200).strip() or "another process"
                raise LockError(f"{self.folder} is in use by {owner}: wait for it, or use another --out")
            time.sleep(0.05)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()

    def shared(self) -> None:
        """Share the lock with the other processes of this job; other jobs stay out."""
        if not self._try(fcntl.LOCK_SH):
            raise LockError(f"{self.folder} is in use by another job: wait for it, or use another --out")

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(f"{self.folder} is on a file system without locks: run one job there", stacklevel=3)
        return True

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
