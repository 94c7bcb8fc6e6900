"""The nine laws of the loop, on every subject and backend.

Torch is tested in float64. The C kernels are tested in float32, within the bounds below; torch.compile on one
subject and without windows, because it compiles anew for every width and number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core.decode import COMPACT_AT, solve
from plain_decoders import algorithm_1, one_position_at_a_time
from subjects import NAMES, overflowing, rescaled, subject

N = 5
COMPILED = ("tarflow-labels",)
WINDOWS = (2, 5, None)


@dataclass(frozen=True)
class Case:
    """A subject with a backend, and what rounding may do to its numbers."""

    name: str
    backend: str
    rule: tuple[tuple[str, Any], ...] = ()  # fields of Method: the laws of another stopping rule

    def method(self, **options: Any) -> jf.Method:
        return jf.Method(**options, **dict(self.rule))

    @property
    def exact(self) -> bool:
        """Whether numbers are float64."""
        return self.backend == "torch"

    @property
    def rounding(self) -> float:
        return 1e-10 if self.exact else 3e-4

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) if self.backend == "compile" else WINDOWS

    def block_and_noise(self, n: int = N, seed: int = 1) -> tuple[jf.Block, Tensor]:
        """The second block in sampling order, whose order is not the data's."""
        one = subject(self.name, torch.float64 if self.exact else torch.float32)
        return one.block(1, n, self.backend), one.flow.noise(n, seed=seed).reshape(n, one.length, -1)


def in_c(name: str) -> bool:
    """Whether the C backend supports the subject; tests/kernels/test_c_declines.py says what it declines."""
    return subject(name, torch.float32).block(1, 1).engine.name == "c"


CASES = [
    *(Case(name, "torch") for name in NAMES),
    *(Case(name, "c") for name in NAMES if in_c(name)),
    *(Case(name, "compile") for name in COMPILED),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case.backend}-{case.name}")
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative where numbers are large."""
    return float(((a - b).abs() / b.abs().clamp_min(1)).max())


def test_the_c_backend_supports_what_the_subjects_say() -> None:
    """Else the laws would say nothing about it."""
    assert all((Case(name, "c") in CASES) == subject(name).in_c for name in NAMES)


def test_law_1_at_most_as_many_sweeps_as_unknown_positions(case: Case) -> None:
    block, z = case.block_and_noise()
    for width in (1, *case.windows):
        stats = jf.decode(block, z, case.method(width=width)).stats.blocks[0]
        assert stats.sweeps.max() <= block.length - 1


def test_law_1_one_more_sweep_after_an_overflow_at_the_frontier() -> None:
    flow = overflowing()
    z = torch.tensor([[0.1, 0.2, 0.3, 2.0], [0.1, 0.2, 0.3, -2.0]])
    for width in WINDOWS:
        out = jf.decode(flow.bound_blocks(2)[0], z[..., None], jf.Method(width=width))
        assert out.stats.blocks[0].sweeps.max() <= 4
        assert out.stats.blocks[0].status[0] is jf.Status.NONFINITE


def test_law_2_width_1_is_sequential_decoding(case: Case) -> None:
    block, z = case.block_and_noise()
    out = jf.decode(block, z, case.method(width=1))
    x, log_det = one_position_at_a_time(block, z)
    assert apart(out.x, x) < case.rounding
    assert apart(out.log_det, log_det) < case.rounding
    assert out.stats.status is jf.Status.EXACT


@pytest.mark.parametrize("tol", [0.3, 1e-3])
def test_law_3_without_a_width_the_loop_is_algorithm_1(case: Case, tol: float) -> None:
    block, z = case.block_and_noise()
    out = jf.decode(block, z, case.method(tol=tol, init="zeros", unit="absolute"))
    for i in range(N):
        x, sweeps = algorithm_1(block.select(torch.tensor([i])), z[i : i + 1], tol, "zeros")
        found = out.stats.blocks[0].sweeps[i].item()
        if case.exact:
            assert sweeps - 1 <= found <= sweeps  # it may know one sweep sooner that nothing will change
        bound = case.rounding if case.exact and found == sweeps else tol + case.rounding
        assert (out.x[i] - x[0]).abs().max() <= bound


@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_law_4_samples_are_independent_of_their_batch(case: Case, tol: float) -> None:
    for width in (1, *case.windows) if tol else case.windows:
        check_batches(case, case.method(width=width, tol=tol))


def check_batches(case: Case, method: jf.Method) -> None:
    block, z = case.block_and_noise()
    batch = jf.decode(block, z, method)
    for i in range(N):
        alone = jf.decode(block.select(torch.tensor([i])), z[i : i + 1], method)
        a, b = alone.stats.blocks[0], batch.stats.blocks[0]
        if case.exact and method.tol:  # at 0 the last sweeps are decided by rounding
            assert (a.sweeps[0], a.status[0]) == (b.sweeps[i], b.status[i])
        if a.sweeps[0] == b.sweeps[i]:  # in float32 rounding may decide whether a change is within tol
            assert apart(batch.x[i], alone.x[0]) < case.rounding


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("tol", [0.1, 1e-3])
def test_law_5_the_answer_is_one_sweep_of_what_was_seen(case: Case, tol: float, cache: bool) -> None:
    for width in case.windows:
        check_answer(case, case.method(width=width, tol=tol, unit="absolute"), cache)


def check_answer(case: Case, method: jf.Method, cache: bool) -> None:
    block, z = case.block_and_noise()
    with torch.inference_mode():
        rows = solve(block, block.to_positions(z), method, "fallback", cache, COMPACT_AT, None)
        theta = block.conditioner.all_params(rows.x)
        again, log_slope = block.bijector.inverse(rows.z, theta)
    answer = rows.answer[:, : block.length]
    assert apart(answer, again) < case.rounding
    assert apart(rows.log_slope[:, : block.length], log_slope.sum(-1)) < case.rounding
    assert (answer - rows.x).abs().max() <= max(method.tol, case.rounding)


def test_law_6_the_deviation_falls_to_rounding_with_tol(case: Case) -> None:
    block, z = case.block_and_noise()
    exact = jf.decode(block, z, case.method(width=1)).x
    for width in case.windows:
        answers = (jf.decode(block, z, case.method(width=width, tol=tol)).x for tol in (0.1, 0.0))
        loose, tight = (apart(x, exact) for x in answers)
        assert tight < case.rounding
        assert loose > tight or loose < case.rounding


def test_law_7_inputs_are_never_written_to(case: Case) -> None:
    block, z = case.block_and_noise()
    before, tensors = z.clone(), [t.clone() for t in block.conditioner.tensors()]
    for width in (1, *case.windows):
        jf.decode(block, z, case.method(width=width, tol=0.1))
    assert torch.equal(z, before)
    assert all(torch.equal(a, b) for a, b in zip(tensors, block.conditioner.tensors(), strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("maf", "nsf"))])
@pytest.mark.parametrize("width", [4, None])
def test_law_8_units_do_not_matter_to_relative_methods(name: str, width: int | None) -> None:
    """In torch: a rescaled network is a wrapper, which no other backend supports."""
    block, z = Case(name, "torch").block_and_noise()
    powers = torch.randint(-20, 11, (block.length,), generator=torch.Generator().manual_seed(0))
    s, c = 2.0 ** powers.double(), 2.0**-15
    method = jf.Method(width=width, tol=1e-4, init="zeros", unit="relative")
    plain = jf.decode(rescaled(block, 1.0, torch.ones_like(s)), z, method)
    scaled = jf.decode(rescaled(block, c, s), z * block.from_positions(s[None, :, None]), method)
    assert torch.equal(scaled.x, plain.x * c)
    assert scaled.stats.blocks[0].status == plain.stats.blocks[0].status


@pytest.mark.parametrize("backend", ["torch", "c"])
@pytest.mark.parametrize("width", [1, *WINDOWS])
def test_law_9_nothing_is_clamped_and_failures_are_statuses(backend: str, width: int | None) -> None:
    flow = overflowing()
    z = torch.tensor([[0.1, 0.2, 0.3, 2.0], [0.1, 0.2, 1e30, -2.0]])
    block = flow.bound_blocks(2, backend=backend)[0]
    out = jf.decode(block, z[..., None], jf.Method(width=width))
    lost, large = out.stats.blocks[0].status
    assert lost is jf.Status.NONFINITE
    assert "float64" in lost.value
    assert out.x[0].isnan().any()
    assert not large.failed
    assert out.x[1].abs().max() > 1e29
