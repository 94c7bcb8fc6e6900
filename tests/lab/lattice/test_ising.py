"""The Ising target against enumeration and plain linear algebra. float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from jacobiflow_lab.lattice.ising import Estimate, Ising

CRITICAL = 2 / math.log(1 + math.sqrt(2))


def states(side: int) -> Tensor:
    """All spins of a torus."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=side**2)), dtype=torch.float64)


def bonds(side: int) -> Tensor:
    """The adjacency J, written bond by bond; for side 2 every pair of neighbours has two."""
    found = torch.zeros(side**2, side**2, dtype=torch.float64)
    for row, column in itertools.product(range(side), repeat=2):
        here = row * side + column
        for there in (row * side + (column + 1) % side, (row + 1) % side * side + column):
            found[here, there] += 1
            found[there, here] += 1
    return found


def coupling(target: Ising) -> Tensor:
    return bonds(target.side) / target.temperature + target.diagonal * torch.eye(target.sites, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.5, CRITICAL, 3.0, 20.0])
@pytest.mark.parametrize("side", [2, 3, 4])
def test_kaufman_is_enumeration(side: int, temperature: float) -> None:
    target, s = Ising(side=side, temperature=temperature), states(side)
    energy = -0.5 * ((s @ bonds(side)) * s).sum(1)
    weight = torch.softmax(-energy / temperature, 0)
    assert target.log_z() == pytest.approx(float(torch.logsumexp(-energy / temperature, 0)), rel=1e-12)
    assert target.exact_energy() == pytest.approx(float((weight * energy).sum()) / side**2, rel=1e-9)


def test_kaufman_of_a_large_torus_is_onsagers() -> None:
    """-2 is the energy of the ground state, -sqrt 2 that of the critical point."""
    assert Ising(side=64, temperature=0.5).exact_energy() == pytest.approx(-2, abs=1e-4)
    assert Ising(side=400, temperature=CRITICAL).exact_energy() == pytest.approx(-math.sqrt(2), abs=2e-3)


@pytest.mark.parametrize("side", [2, 3, 4])
def test_energy_counts_two_bonds_a_site(side: int) -> None:
    target, s = Ising(side=side), states(side)[::7]
    expected = -0.5 * ((s @ bonds(side)) * s).sum(1) / side**2
    assert torch.allclose(target.energy(s), expected)
    assert target.energy(torch.ones(1, side**2)).item() == -2
    assert target.magnetization(-torch.ones(1, side**2)).item() == 1


@pytest.mark.parametrize("shift", [0.0, 2.5])
@pytest.mark.parametrize("side", [2, 3])
def test_density_is_that_of_spins_and_normal_fields(side: int, shift: float) -> None:
    """exp(log_density(phi)) is the sum over spins of exp(-E(s) / T) N(phi; K s, K): it integrates to Z."""
    target, s = Ising(side=side, temperature=2.5, shift=shift), states(side)
    k = coupling(target)
    phi = 2 * torch.randn(5, side**2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normal = torch.distributions.MultivariateNormal(s @ k, k)
    each = normal.log_prob(phi[:, None]) - target.energy(s) * side**2 / 2.5
    assert torch.allclose(target.log_density(phi), torch.logsumexp(each, 1), rtol=1e-10)


def test_density_has_the_right_gradient() -> None:
    target = Ising(side=4)
    phi = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (found,) = torch.autograd.grad(target.log_density(phi).sum(), phi)
    expected = phi.tanh() - torch.linalg.solve(coupling(target), phi, left=False)
    assert torch.allclose(found, expected, rtol=1e-10)
    far = torch.full((1, 16), 400.0)  # cosh of it overflows
    assert target.log_density(far).isfinite().all()


def test_root_and_powers_of_the_coupling() -> None:
    target = Ising(side=3, temperature=1.0)
    k = coupling(target)
    assert torch.allclose(target.root() @ target.root(), k)
    assert torch.allclose(target.couple(torch.eye(9, dtype=torch.float64), -1.0) @ k, torch.eye(9).double())
    assert torch.allclose(target.spectrum().flatten().sort().values, torch.linalg.eigvalsh(k))


def test_fields_and_spins_keep_the_law() -> None:
    """Exact spins -> fields -> spins are exact spins: what the transform promises."""
    target, s = Ising(side=3, temperature=2.0), states(3)
    draw = torch.Generator().manual_seed(0)
    weight = torch.softmax(-target.energy(s) * 9 / 2.0, 0)
    exact = s[torch.multinomial(weight, 40_000, replacement=True, generator=draw)]
    noise = torch.randn(exact.shape, generator=draw, dtype=exact.dtype)
    phi = target.couple(exact) + target.couple(noise, 0.5)
    again = target.spins(phi, draw)
    for what in (target.energy, target.magnetization):
        found, expected = Estimate.of(what(again)), float((weight * what(s)).sum())
        assert abs(found.value - expected) < 4 * found.error
        assert found.error < 0.01
    assert Estimate.of(target.energy(phi.tanh())).value == pytest.approx(target.exact_energy(), abs=0.02)


@pytest.mark.parametrize("side", [2, 3, 4])
def test_monte_carlo_is_enumeration_within_its_error(side: int) -> None:
    target, s = Ising(side=side, temperature=2.5), states(side)
    weight = torch.softmax(-target.energy(s) * side**2 / 2.5, 0)
    found = target.monte_carlo(chains=200, sweeps=300, warmup=50, seed=1)
    for name, what in (
        ("energy_per_site", target.energy),
        ("abs_magnetization", target.magnetization),
    ):
        estimate = getattr(found, name)
        assert 0 < estimate.error < 0.01
        assert abs(estimate.value - float((weight * what(s)).sum())) < 4 * estimate.error


@pytest.mark.parametrize("side", [2, 3, 5, 6])
def test_sites_of_one_colour_are_no_neighbours(side: int) -> None:
    colours = [c.flatten().double() for c in Ising(side=side)._colours()]
    assert torch.equal(torch.stack(colours).sum(0), torch.ones(side**2, dtype=torch.float64))
    assert all(c @ bonds(side) @ c == 0 for c in colours)
