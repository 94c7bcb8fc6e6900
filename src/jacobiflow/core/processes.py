"""The processes of one command: their number, what they share, how they stop, and how they keep others out."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jacobiflow.core.arguments import as_int
from jacobiflow.core.results import JacobiflowError

T = TypeVar("T")
ECHO = 2.0  # seconds within which torchrun repeats a Ctrl-C that its processes already received
WAIT = 3.0  # seconds that the processes of a killed job may need to end
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # errors of file systems without locks


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`; process `local_rank` of `local_size` on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> World:
        """From the variables that torchrun sets. Several processes join a process group."""
        size = _number("WORLD_SIZE", 1)
        if size <= 1:
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            with peers():
                store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
                # torchrun keeps its store over restarts: the processes of one must not find those of another
                restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(restart, store)  # type: ignore[attr-defined]
                dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        return cls(dist.get_rank(), size, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", size))

    @property
    def leader(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """This process's own device of the given type."""
        if device.type == "cuda" and self.size > 1:
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over all processes, equal on each. Changes x."""
        if self.size > 1:
            with peers():
                dist.all_reduce(x)
            x /= self.size
        return x

    def any(self, flag: bool) -> bool:
        """Whether any process sets `flag`. All processes wait for each other here."""
        return bool(self.mean(torch.tensor(float(flag))) > 0)  # gloo waits longer than NCCL for a leader that writes

    def share(self, make: Callable[[], T]) -> T:
        """The leader's result of `make`, on every process. If it fails there, the others exit quietly."""
        box: list[Any] = [None, False]
        try:
            if self.leader:
                box = [make(), True]
        finally:
            if self.size > 1:
                with peers():
                    dist.broadcast_object_list(box)
        if not box[1]:
            raise SystemExit(2)
        return box[0]  # type: ignore[no-any-return]

    def patient_group(self) -> Any:
        """A group for `gather` whose processes may wait days for each other. All processes must call this."""
        with peers():
            return None if self.size == 1 else dist.new_group(backend="gloo", timeout=timedelta(days=30))

    def gather(self, mine: T, group: Any) -> list[T]:
        """The values of all processes, by rank. All processes wait for each other here."""
        values: list[Any] = [mine] * self.size
        if self.size > 1:
            with peers():
                dist.all_gather_object(values, mine, group=group)
        return values


@contextmanager
def peers() -> Iterator[None]:
    """A connection that is closed because another process has ended, as one line."""
    try:
        yield
    except RuntimeError as error:  # a DistError, or a plain one with the name of gloo's file
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise JacobiflowError("another process has ended: run the same command again to resume") from None


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    return as_int(f"{name} in the environment", int(text) if text.isascii() and text.isdigit() else text)


def leave_process_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class StopKey:
    """Records Ctrl-C or SIGTERM, so that work is saved before it ends. A second Ctrl-C ends it at once.

    A second SIGTERM changes nothing: `timeout`, batch systems and torchrun send several. The terminal and torchrun
    may both pass on one Ctrl-C, so with several processes another one within ECHO seconds is ignored.
    """

    def __init__(self) -> None:
        self.pressed, self.when, self.before = False, 0.0, dict[int, Any]()

    def __enter__(self) -> StopKey:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.press)
        return self

    def press(self, number: int, frame: FrameType | None) -> None:
        echo = _number("WORLD_SIZE", 1) > 1 and time.monotonic() < self.when + ECHO
        if self.pressed and number == signal.SIGINT and not echo:
            raise KeyboardInterrupt
        if not self.pressed:
            self.pressed, self.when = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Lock:
    """A lock on a folder, exclusive for a job's first process, then shared; it goes with the process that holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # a link could point to any file
        self.file = open(os.open(folder / ".lock", flags, 0o666), "a+", encoding="utf-8")  # noqa: SIM115

    def exclusive(self) -> None:
        deadline = time.monotonic() + WAIT
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self.file.seek(0)
                owner = self.file.read(200).strip() or "another process"
                raise JacobiflowError(f"{self.folder} is in use by {owner}: wait for it, or use another --out")
            time.sleep(0.05)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()

    def shared(self) -> None:
        if not self._try(fcntl.LOCK_SH):
            raise JacobiflowError(f"{self.folder} is in use by another job: wait for it, or use another --out")

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(f"{self.folder} is on a file system without locks: run one job there", stacklevel=3)
        return True

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
