"""Laws that hold for every flow, however it is decoded. float64 unless said otherwise."""

from __future__ import annotations

import math

import pytest
import torch

import jacobiflow as jf
from subjects import NAMES, Subject, rescaled, subject

N = 6
WIDTHS = (1, 2, 3, 7, None)


@pytest.fixture(params=NAMES)
def one(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


def plan(one: Subject, **method: object) -> jf.Plan:
    return jf.Plan((jf.Method(**method),) * len(one.flow.blocks))


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_sweeps_have_work_to_do(one: Subject) -> None:
    """Else the other laws would say nothing."""
    out = one.decode(one.flow.noise(N, seed=1), "uniform", tol=1e-6)
    for stats in out.stats.blocks:
        assert stats.sweeps.min() >= one.length / 4
        assert stats.sweeps.max() <= one.length - 1
        assert set(stats.status) <= {jf.Status.EXACT, jf.Status.CONVERGED}


def test_decode_inverts_encode(one: Subject) -> None:
    x = one.decode(one.flow.noise(N, seed=2), "sequential").x
    z, log_det = one.encode(x)
    again = one.decode(z, "sequential")
    assert worst(again.x, x) < 1e-9
    assert worst(again.log_det, -log_det) < 1e-9
    if not one.guidance.weight:
        enc = one.flow.encode(x, **one.condition(N))
        assert worst(enc.z, z) == 0
        assert worst(enc.log_det, log_det) == 0


def test_log_prob_is_autograds(one: Subject) -> None:
    x = one.decode(one.flow.noise(1, seed=3), "sequential").x
    jacobian = torch.autograd.functional.jacobian(lambda v: one.encode(v)[0].flatten(), x)
    expected = torch.linalg.slogdet(jacobian.reshape(x.numel(), x.numel())).logabsdet
    z, log_det = one.encode(x)
    assert abs(log_det.item() - expected.item()) < 1e-9
    if not one.guidance.weight:
        normal = -0.5 * (z.square().sum() + z.numel() * math.log(2 * math.pi))
        found = one.flow.log_prob(x, **one.condition(1))
        assert abs(found.item() - (normal + expected).item()) < 1e-9
        bits = one.flow.bits_per_dim(x, **one.condition(1))
        assert abs(bits.item() + found.item() / x.numel() / math.log(2)) < 1e-12


@pytest.mark.parametrize(
    ("width", "init"), [(w, "previous") for w in WIDTHS] + [(None, "zeros"), (3, "noise"), (None, "noise")]
)
def test_full_sweeps_are_sequential(one: Subject, width: int | None, init: str) -> None:
    z = one.flow.noise(N, seed=4)
    exact = one.decode(z, "sequential")
    out = one.decode(z, plan(one, width=width, init=init))
    assert worst(out.x, exact.x) < 1e-10
    assert worst(out.log_det, exact.log_det) < 1e-10
    assert out.stats.status is jf.Status.EXACT


@pytest.mark.parametrize("width", [1, 3, None])
def test_float32_full_sweeps_are_sequential(one: Subject, width: int | None, request: pytest.FixtureRequest) -> None:
    single = subject(request.node.callspec.params["one"], torch.float32)
    z = one.flow.noise(N, seed=4)
    exact = one.decode(z, "sequential")
    out = single.decode(z.float(), plan(one, width=width))
    assert worst(out.x.double(), exact.x) < 1e-4
    assert worst(out.log_det.double(), exact.log_det) < 1e-4


@pytest.mark.parametrize(("width", "tol"), [(1, 0.0), (3, 0.0), (7, 1e-3), (None, 0.0), (None, 1e-3)])
def test_cached_is_uncached(one: Subject, width: int | None, tol: float) -> None:
    z = one.flow.noise(N, seed=5)
    cached = one.decode(z, plan(one, width=width, tol=tol))
    plain = one.decode(z, plan(one, width=width, tol=tol), cache=False)
    assert worst(cached.x, plain.x) < 1e-10
    assert worst(cached.log_det, plain.log_det) < 1e-10
    for a, b in zip(cached.stats.blocks, plain.stats.blocks, strict=True):
        if tol:  # at 0 the last sweeps are decided by rounding
            assert a.sweeps.tolist() == b.sweeps.tolist()
        assert (a.evaluated <= b.evaluated).all()


@pytest.mark.parametrize("width", [7, None])
@pytest.mark.parametrize("sweeps", [1, 3])
def test_first_positions_are_exact_after_as_many_sweeps(one: Subject, width: int | None, sweeps: int) -> None:
    """The second block, so that every subject has one whose order is not its data's."""
    block, z = one.block(1, N), one.flow.noise(N, seed=6).reshape(N, one.length, -1)
    exact = jf.decode(block, z, jf.Method(width=1)).x
    method = jf.Method(width=width, max_sweeps=sweeps, init="zeros")
    out = jf.decode(block, z, method, on_failure="return")
    found, exact = block.to_positions(out.x), block.to_positions(exact)
    assert worst(found[:, : sweeps + 1], exact[:, : sweeps + 1]) < 1e-12  # the first position is given
    rest = slice(sweeps + 1, width)
    assert worst(found[:, rest], exact[:, rest]) > 1e-9
    assert out.stats.status is jf.Status.SWEEP_LIMIT
    assert (out.stats.blocks[0].update > 0).all()


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("width", "tol"), [(None, 0.0), (4, 1e-3), (4, 0.5), (None, 0.5)])
def test_a_sample_is_its_own(
    one: Subject,
    width: int | None,
    tol: float,
    dtype: torch.dtype,
    close: float,
    request: pytest.FixtureRequest,
) -> None:
    """Alone, in a batch of 17, and elsewhere in it."""
    own = subject(request.node.callspec.params["one"], dtype)
    z = own.flow.noise(17, seed=7)
    how = plan(own, width=width, tol=tol, init="previous")
    batch = own.decode(z, how, **own.condition(17))
    turned = {k: v.flip(0) for k, v in own.condition(17).items()}
    elsewhere = own.decode(z.flip(0), how, **turned)
    doubtful = 0
    for i in range(17):
        alone = own.decode(z[i : i + 1], how, **own.condition(1, start=i))
        bound = close * max(1, alone.x.abs().max().item())
        apart = [
            (other, j) for other, j in ((batch, i), (elsewhere, 16 - i)) if not worst(other.x[j], alone.x[0]) < bound
        ]
        assert all(tol and _on_the_edge(alone, other, j, tol) for other, j in apart)
        doubtful += bool(apart)
    assert doubtful <= 1


def _on_the_edge(alone: jf.Decoded, batch: jf.Decoded, row: int, tol: float) -> bool:
    """Whether rounding decided the number of sweeps: an update within 1e-5 of tol."""
    for a, b in zip(alone.stats.blocks, batch.stats.blocks, strict=True):
        if a.sweeps[0] != b.sweeps[row]:
            near = min(abs(a.update[0].item() - tol), abs(b.update[row].item() - tol))
            assert near < 1e-5, (a.update, b.update[row])
            return True
    return False


def test_inputs_are_never_written_to_and_no_graph_is_kept(one: Subject) -> None:
    flow = one.flow
    flow.requires_grad_(True)
    try:
        z = flow.noise(N, seed=8).requires_grad_()
        given = {k: v.clone() for k, v in one.condition(N).items()}
        before = z.detach().clone()
        for how in ("sequential", "uniform"):
            out = one.decode(z, how, check=True, **given)
            assert not out.x.requires_grad
            assert not out.log_det.requires_grad
            (out.x.sum() * torch.ones((), requires_grad=True)).backward()  # an ordinary tensor
        assert torch.equal(z, before)
        for k, v in one.condition(N).items():
            assert torch.equal(given[k], v)
        assert all(p.grad is None for p in flow.parameters())
    finally:
        flow.requires_grad_(False)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("how", ["sequential", "uniform", "selective"])
def test_small_batches(one: Subject, n: int, how: str) -> None:
    out = one.decode(one.flow.noise(n, seed=9), how, check=True)
    assert out.x.shape == (n, *one.flow.data_shape)
    assert out.log_det.shape == out.stats.residual.shape == (n,)
    assert all(len(b.status) == len(b.sweeps) == n for b in out.stats.blocks)
    assert out.stats.status.rank <= jf.Status.CONVERGED.rank


def test_residual_says_how_exact_the_answer_is(one: Subject) -> None:
    z = one.flow.noise(N, seed=10)
    exact, loose = one.decode(z, "sequential", check=True), one.decode(z, "uniform", tol=0.1, check=True)
    assert exact.stats.residual.max() < 1e-11
    found, _ = one.encode(loose.x)
    assert worst(loose.stats.residual, (found - z).abs().flatten(1).amax(1)) < 1e-12
    assert loose.stats.residual.min() > 1e-9
    assert one.decode(z, "uniform", tol=0.1).stats.residual is None


RELATIVE = [name for name in NAMES if name.startswith(("maf", "nsf"))]


def test_the_unit_is_the_familys(one: Subject, request: pytest.FixtureRequest) -> None:
    relative = request.node.callspec.params["one"] in RELATIVE
    assert {m.unit for m in one.flow.plan("uniform")} == {"relative" if relative else "absolute"}


def both_scales(one: Subject, c: float, s: torch.Tensor, unit: str, **method: object) -> tuple[jf.Decoded, jf.Decoded]:
    """A block decoded as it is, and with data c times and latents s times as large.

    Both in the wrapper: torch rounds a softmax by how its input lies in memory.
    """
    how = jf.Method(init="zeros", unit=unit, **method)
    block, z = one.block(1, N), one.flow.noise(N, seed=11)[..., None]
    plain = jf.decode(rescaled(block, 1.0, torch.ones_like(s)), z, how)
    return plain, jf.decode(rescaled(block, c, s), z * block.from_positions(s[None, :, None]), how)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize(("width", "tol"), [(None, 0.0), (None, 1e-4), (4, 1e-2)])
@pytest.mark.parametrize("power", [-20, 20])
def test_the_scale_of_the_data_does_not_matter(name: str, width: int | None, tol: float, power: int) -> None:
    one = subject(name)
    s = torch.ones(one.length, dtype=torch.float64)
    plain, out = both_scales(one, 2.0**power, s, "relative", width=width, tol=tol)
    assert torch.equal(out.x, plain.x * 2.0**power)
    assert out.stats.blocks[0].status == plain.stats.blocks[0].status
    assert torch.equal(out.stats.blocks[0].sweeps, plain.stats.blocks[0].sweeps)
    assert worst(out.log_det, plain.log_det + one.length * power * math.log(2)) < 1e-9


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize(("width", "tol"), [(None, 0.0), (None, 1e-4), (4, 1e-2)])
def test_the_scales_of_the_latents_do_not_matter(name: str, width: int | None, tol: float) -> None:
    one = subject(name)
    powers = torch.randint(-20, 11, (one.length,), generator=torch.Generator().manual_seed(0))
    s = 2.0 ** powers.double()
    plain, out = both_scales(one, 1.0, s, "relative", width=width, tol=tol)
    assert torch.equal(out.x, plain.x)
    assert out.stats.blocks[0].status == plain.stats.blocks[0].status


def test_absolute_changes_depend_on_the_scale() -> None:
    """Else the two laws above would say nothing."""
    one = subject("maf-affine")
    s = torch.ones(one.length, dtype=torch.float64)
    plain, out = both_scales(one, 2.0**-20, s, "absolute", tol=1e-4)
    assert (out.stats.blocks[0].sweeps < plain.stats.blocks[0].sweeps).all()
    assert worst(out.x * 2.0**20, plain.x) > 0.1
