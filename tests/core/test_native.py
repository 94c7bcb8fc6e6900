"""The compiled elementwise functions against torch's, in double precision."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch

import jacobiflow as jf
from jacobiflow.core import native
from jacobiflow.core.bijectors import Bijector, ExpAffine, ScaleAffine

MAPS: dict[str, Bijector] = {
    "exp": ExpAffine(),
    "softplus": ScaleAffine("softplus", 1e-3),
    "softplus, no floor": ScaleAffine("softplus", 0.0),
    "sigmoid": ScaleAffine("sigmoid", 1e-3),
}


@pytest.fixture(autouse=True)
def there() -> None:
    assert native.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("n", "w", "d"), [(1, 1, 1), (3, 7, 1), (5, 4, 3), (2, 49, 16), (0, 3, 2)])
def test_affine_maps(name: str, n: int, w: int, d: int) -> None:
    draw = torch.Generator().manual_seed(n + w)
    z = torch.randn(n, w + 2, d, generator=draw)[:, 1:-1]
    theta = torch.randn(n, w, 2 * d, generator=draw) * 4
    with torch.no_grad():
        want = MAPS[name].inverse(z.double(), theta.double())
        found = MAPS[name].inverse(z, theta)
        for mine, its in zip(found, want, strict=True):
            torch.testing.assert_close(mine, its.float(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", MAPS)
def test_extremes(name: str) -> None:
    """Small scales keep their digits, and overflow is infinite, not clamped."""
    raw = torch.tensor([-60.0, -20.0, -5.0, -1e-4, 0.0, 1e-4, 5.0, 20.0, 60.0, 85.0, 88.6])
    theta = torch.stack((raw, torch.full_like(raw, 0.25)), -1)[None]
    z = torch.ones(1, len(raw), 1)
    with torch.no_grad():
        want = [t.float() for t in MAPS[name].inverse(z.double(), theta.double())]
        found = MAPS[name].inverse(z, theta)
        for mine, its in zip(found, want, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-6, rtol=3e-6)
        for odd in (math.nan, math.inf):
            theta = torch.tensor([[[odd, 0.0], [0.0, odd], [0.0, 0.0]]])
            x, slope = MAPS[name].inverse(torch.ones(1, 3, 1), theta)
            exact, log = MAPS[name].inverse(torch.ones(1, 3, 1).double(), theta.double())
            assert torch.equal(x.isfinite() & slope.isfinite(), exact.isfinite() & log.isfinite())
    if name == "exp":
        x, _ = MAPS[name].inverse(torch.ones(1, 1, 1), torch.tensor([[[90.0, 0.0]]]))
        assert x.item() == math.inf


def test_gradients_go_through_torch() -> None:
    theta = torch.randn(2, 3, 2, requires_grad=True)
    ExpAffine().inverse(torch.randn(2, 3, 1), theta)[0].sum().backward()
    assert theta.grad is not None


@pytest.fixture
def three() -> Iterator[None]:
    """Three threads of torch's."""
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(count)


@torch.no_grad()
def test_small_work_runs_alone(three: None) -> None:
    with native.alone(torch.zeros(10)):
        assert (native.threads(), torch.get_num_threads()) == (3, 1)
        with native.alone(torch.zeros(10)):
            assert (native.threads(), torch.get_num_threads()) == (3, 1)
        assert (native.threads(), torch.get_num_threads()) == (3, 1)
    assert (native.threads(), torch.get_num_threads()) == (3, 3)
    with native.alone(torch.empty(native.SMALL + 1)):
        assert torch.get_num_threads() == 3
    with native.alone(torch.zeros(3, dtype=torch.float64)):
        assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), native.alone(torch.zeros(10)):
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

    with native.alone(torch.zeros(10)):
        assert torch.get_num_threads() == 1
        thread = threading.Thread(target=born)
        thread.start()
        thread.join()
    assert found == [3]


def test_without_the_pool_nothing_changes(three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "openmp", lambda: None)
    with torch.no_grad(), native.alone(torch.zeros(10)):
        assert (native.threads(), torch.get_num_threads()) == (3, 3)
