"""The elementwise maps of the C kernels against torch's, in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from formulas import MAPS
from jacobiflow.core.bijectors import Bijector, ExpAffine, Formula, ScaleAffine, Spline, description
from jacobiflow.kernels import build, c_engine
from jacobiflow.kernels.c_engine import CMap, c_map

AFFINE = {name: MAPS[name] for name in ("exp", "softplus", "sigmoid")}


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


def known(bijector: Bijector) -> CMap:
    found = c_map(bijector)
    assert found is not None
    return found


def test_every_formula_has_a_bijector_here() -> None:
    codes = {known(m).code for m in MAPS.values()}
    assert (
        codes
        == set(c_engine.codes_of(build.library())[0].values())
        == set(range(len(c_engine.codes_of(build.library())[0])))
    )


class Doubled(ExpAffine):
    """Another formula under an inherited description."""

    def inverse(self, z: torch.Tensor, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().inverse(2 * z, theta)


class Steep(Spline):
    _offset = 1.0


@pytest.mark.parametrize("bijector", [Doubled(), Steep()], ids=lambda b: type(b).__name__)
def test_what_does_not_describe_itself_is_declined(bijector: Bijector) -> None:
    assert description(bijector) is None
    assert c_map(bijector) is None


@pytest.mark.parametrize(
    "formula", [Formula("cubic", (1.0,)), Formula("softclip", (1.0, 2.0)), Formula("exp", (1.0,))]
)
def test_unknown_formulas_are_declined(formula: Formula) -> None:
    other = type("Other", (ExpAffine,), {"describe": lambda self: formula})()
    assert description(other) == formula
    assert c_map(other) is None


def test_scales_without_a_floor_are_declined() -> None:
    assert c_map(ScaleAffine("softplus", 0.0)) is None
    assert c_map(ScaleAffine("sigmoid", 1e-40)) is None


def test_other_panels_are_noticed_when_the_library_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = build.library()
    assert lib is not None
    monkeypatch.setattr(build, "PANEL", 8)
    with pytest.raises(RuntimeError, match="PANEL"):
        build.declare(lib)


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize(("n", "w", "d"), [(1, 1, 1), (3, 7, 1), (5, 4, 3), (2, 49, 16), (0, 3, 2)])
def test_affine_maps(name: str, n: int, w: int, d: int) -> None:
    draw = torch.Generator().manual_seed(n + w)
    z = torch.randn(n, w + 2, d, generator=draw)[:, 1:-1]
    theta = torch.randn(n, w, 2 * d, generator=draw) * 4
    want = AFFINE[name].inverse(z.double(), theta.double())
    for mine, its in zip(known(AFFINE[name]).inverse(z, theta), want, strict=True):
        torch.testing.assert_close(mine, its.float(), atol=2e-6, rtol=2e-6)
    both = known(AFFINE[name]).inverse(z.double(), theta.double())  # which C does not take
    assert all(torch.equal(a, b) for a, b in zip(both, want, strict=True))


@pytest.mark.parametrize("name", [name for name in MAPS if name not in (*AFFINE, "shift")])
@pytest.mark.parametrize("n", [0, 1, 3, 40])
def test_the_first_position_of_other_maps(name: str, n: int) -> None:
    bijector, draw = MAPS[name], torch.Generator().manual_seed(n)
    z = torch.randn(n, 3, 1, generator=draw)[:, 1:2]
    theta = torch.randn(n, 1, bijector.params, generator=draw)
    want = bijector.inverse(z.double(), theta.double())
    for mine, its in zip(known(bijector).inverse(z, theta), want, strict=True):
        torch.testing.assert_close(mine, its.float(), atol=2e-5, rtol=2e-5)
    theta[:1, :, 0] = math.nan
    (x, slope), (want_x, log) = known(bijector).inverse(z, theta), bijector.inverse(z, theta)
    assert torch.equal(x.isfinite() & slope.isfinite(), want_x.isfinite() & log.isfinite())


@pytest.mark.parametrize("name", AFFINE)
def test_extremes(name: str) -> None:
    """Small scales keep their digits, and overflow is infinite, not clamped."""
    raw = torch.tensor([-60.0, -20.0, -5.0, -1e-4, 0.0, 1e-4, 5.0, 20.0, 60.0, 85.0, 88.6])
    theta, z = torch.stack((raw, torch.full_like(raw, 0.25)), -1)[None], torch.ones(1, len(raw), 1)
    exact, ours = AFFINE[name].inverse, known(AFFINE[name]).inverse
    for mine, its in zip(ours(z, theta), exact(z.double(), theta.double()), strict=True):
        torch.testing.assert_close(mine, its.float(), atol=1e-6, rtol=3e-6)
    for odd in (math.nan, math.inf):
        theta, z = torch.tensor([[[odd, 0.0], [0.0, odd], [0.0, 0.0]]]), torch.ones(1, 3, 1)
        (x, slope), (want, log) = ours(z, theta), exact(z.double(), theta.double())
        assert torch.equal(x.isfinite() & slope.isfinite(), want.isfinite() & log.isfinite())
    if name == "exp":
        assert ours(torch.ones(1, 1, 1), torch.tensor([[[90.0, 0.0]]]))[0].item() == math.inf
