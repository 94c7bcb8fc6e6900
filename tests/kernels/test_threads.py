"""Threads of torch and of the C kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import jacobiflow as jf
from jacobiflow.kernels import build, threads


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


@pytest.fixture
def three() -> Iterator[None]:
    """Three threads of torch's."""
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(count)


@torch.no_grad()
def test_small_work_runs_alone(three: None) -> None:
    with threads.torch_single_threaded(torch.zeros(10)):
        assert (threads.thread_count(), torch.get_num_threads()) == (3, 1)
        with threads.torch_single_threaded(torch.zeros(10)):
            assert (threads.thread_count(), torch.get_num_threads()) == (3, 1)
        assert (threads.thread_count(), torch.get_num_threads()) == (3, 1)
    assert (threads.thread_count(), torch.get_num_threads()) == (3, 3)
    with threads.torch_single_threaded(torch.empty(threads.SMALL_NUMEL + 1)):
        assert torch.get_num_threads() == 3
    with threads.torch_single_threaded(torch.zeros(3, dtype=torch.float64)):
        assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), threads.torch_single_threaded(torch.zeros(10)):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_whole_decoding_runs_alone(three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch does between two blocks would leave its threads spinning while the next one is solved."""
    flow, seen = jf.TarFlow(jf.TarFlowConfig(image_size=8, image_channels=1, width=64, blocks=2)), []
    whole = flow.from_sequence
    monkeypatch.setattr(flow, "from_sequence", lambda x: seen.append(torch.get_num_threads()) or whole(x))
    flow.decode(flow.noise(2, seed=0), "sequential")
    assert seen == [1]
    assert torch.get_num_threads() == 3


@torch.no_grad()
def test_other_threads_keep_their_number(three: None) -> None:
    """Those that are born while something small is decoded, too."""
    found: list[int] = []

    def born() -> None:
        found.append(torch.get_num_threads())

    with threads.torch_single_threaded(torch.zeros(10)):
        assert torch.get_num_threads() == 1
        thread = threading.Thread(target=born)
        thread.start()
        thread.join()
    assert found == [3]


def test_without_the_pool_nothing_changes(three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openmp", lambda: None)
    with torch.no_grad(), threads.torch_single_threaded(torch.zeros(10)):
        assert (threads.thread_count(), torch.get_num_threads()) == (3, 3)
