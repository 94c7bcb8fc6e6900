"""The Ising model of an L x L torus as a density over fields, and its exact values.

Spins have no density. The Hubbard-Stratonovich transform gives them one: with J the adjacency of the
torus and K = J / T + c I positive definite,
    exp(s' J s / 2T) = exp(-c N / 2) E[exp(s' phi)],   phi ~ N(0, K),
so that summing over all spins leaves fields phi with the density
    p(phi) = exp(-phi' K^-1 phi / 2) prod_i 2 cosh(phi_i) / (Z exp(c N / 2) sqrt(det 2 pi K)),
Z the partition function of the spins. Given phi they are independent, P(s_i = 1) = 1 / (1 + exp(-2 phi_i)),
and their joint law is exactly Ising's; given spins, phi is normal of mean K s and covariance K.

The torus has two bonds per site, to the right and below: for L = 2 they join each pair twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ising:
    """The density that a flow is trained for. Fields are [n, side * side], row by row.

    >>> Ising(side=4, temperature=3.0).log_density(torch.zeros(1, 16)).shape
    torch.Size([1])
    """

    side: int = 16
    """Sites along each direction of the torus."""
    temperature: float = 3.0
    """In units of the coupling; the infinite lattice is critical at 2.269."""
    shift: float = 0.0
    """c of K = J / T + c I, above 4 / T. 0: 4.04 / T. A smaller c makes the fields closer to normal."""

    def __post_init__(self) -> None:
        if self.side < 2:
            raise ValueError(f"Ising.side must be 2 or more, not {self.side}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"Ising.temperature must be positive, not {self.temperature}")
        if self.shift and not 4 / self.temperature < self.shift < math.inf:
            raise ValueError(f"Ising.shift must be above 4 / T = {4 / self.temperature:.4g}, not {self.shift}")

    @property
    def sites(self) -> int:
        """N, side * side."""
        return self.side**2

    @property
    def diagonal(self) -> float:
        """c of K = J / T + c I."""
        return self.shift or 4.04 / self.temperature

    def spectrum(self) -> Tensor:
        """Eigenvalues of K by wave number, [side, side], float64."""
        wave = 2 * torch.cos(2 * math.pi * torch.arange(self.side, dtype=torch.float64) / self.side)
        return (wave[:, None] + wave) / self.temperature + self.diagonal

    def couple(self, x: Tensor, power: float = 1.0) -> Tensor:
        """K^power x for the rows of x [n, sites]."""
        waves = torch.fft.fft2(x.reshape(-1, self.side, self.side)) * self.spectrum().pow(power).to(x)
        coupled: Tensor = torch.fft.ifft2(waves).real
        return coupled.flatten(1)

    def log_density(self, phi: Tensor) -> Tensor:
        """log p(phi) + log Z [n], in nats: its exponential integrates to Z.

        So E[log_density(phi) - log q(phi)] over phi ~ q is a lower bound of log Z for any q.
        """
        spread = (phi * self.couple(phi, -1.0)).sum(1)
        volume = float((2 * math.pi * self.spectrum()).log().sum()) + self.sites * self.diagonal
        return torch.logaddexp(phi, -phi).sum(1) - 0.5 * (spread + volume)

    def root(self) -> Tensor:
        """The symmetric square root of K, [sites, sites]: y' root ~ N(0, K) for standard normal y."""
        return self.couple(torch.eye(self.sites, dtype=torch.float64), 0.5)

    # Observables

    def spins(self, phi: Tensor, draw: torch.Generator | None = None) -> Tensor:
        """Spins +-1 of fields, drawn from P(s | phi)."""
        u = torch.rand(phi.shape, generator=draw, dtype=phi.dtype).to(phi.device)
        return torch.where(u < torch.sigmoid(2 * phi), 1.0, -1.0).to(phi.dtype)

    def energy(self, spins: Tensor) -> Tensor:
        """Energy per site, [n]: minus the sum of s_i s_j over the two bonds of each site, / N."""
        s = spins.reshape(-1, self.side, self.side)
        return -(s * (s.roll(1, 1) + s.roll(1, 2))).flatten(1).mean(1)

    def magnetization(self, spins: Tensor) -> Tensor:
        """|m| = |mean spin|, [n]."""
        return spins.mean(1).abs()

    # Reference values

    def log_z(self) -> float:
        """log Z of the finite torus (Kaufman, 1949)."""
        return float(_kaufman(self.side, torch.tensor(1 / self.temperature, dtype=torch.float64)))

    def exact_energy(self) -> float:
        """Energy per site of the finite torus: -d log Z / d (1 / T), / N."""
        beta = torch.tensor(1 / self.temperature, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(_kaufman(self.side, beta), beta)
        return -float(slope) / self.sites

    def monte_carlo(self, *, chains: int = 256, sweeps: int = 2000, warmup: int = 500, seed: int = 0) -> MonteCarlo:
        """Heat bath in independent chains from random spins, all sites of one colour at once."""
        draw = torch.Generator().manual_seed(seed)
        s = torch.randint(0, 2, (chains, self.side, self.side), generator=draw).float() * 2 - 1
        colours = self._colours()
        energy, magnet = torch.zeros(chains), torch.zeros(chains)
        for sweep in range(warmup + sweeps):
            for sites in colours:
                near = s.roll(1, 1) + s.roll(-1, 1) + s.roll(1, 2) + s.roll(-1, 2)
                up = torch.sigmoid(2 * near[:, sites] / self.temperature)
                u = torch.rand(up.shape, generator=draw)
                s[:, sites] = torch.where(u < up, 1.0, -1.0)
            if sweep >= warmup:
                energy += self.energy(s.flatten(1)) / sweeps
                magnet += self.magnetization(s.flatten(1)) / sweeps
        return MonteCarlo(energy_per_site=Estimate.of(energy), abs_magnetization=Estimate.of(magnet))

    def _colours(self) -> list[Tensor]:
        """Masks [side, side] of sites without neighbours among them: two, or three if the side is odd."""
        line = torch.arange(self.side) % 2
        line[-1] = 2 if self.side % 2 else line[-1]
        count = 2 + self.side % 2
        colour = (line[:, None] + line) % count
        return [colour == k for k in range(count)]


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, independent: Tensor) -> Estimate:
        """Of independent values [n]."""
        x = independent.double()
        return cls(float(x.mean()), float(x.std() / len(x) ** 0.5))


@dataclass(frozen=True, kw_only=True)
class MonteCarlo:
    """Means over heat bath chains, each chain one independent value."""

    energy_per_site: Estimate
    abs_magnetization: Estimate


def _kaufman(side: int, beta: Tensor) -> Tensor:
    """log Z of the side x side torus, differentiable in beta:
        2 Z = (2 sinh 2b)^(N/2) (prod 2 cosh(L g_odd / 2) + prod 2 sinh(L g_odd / 2)
                                 + prod 2 cosh(L g_even / 2) + prod 2 sinh(L g_even / 2)),
        cosh g_l = cosh 2b coth 2b - cos(pi l / L),   g_0 = 2b + log tanh b.
    g_0 changes sign at the critical point: the last product is positive below it and negative above.
    """
    angle = math.pi * torch.arange(1, 2 * side, dtype=torch.float64) / side
    gamma = torch.acosh(torch.cosh(2 * beta) / torch.tanh(2 * beta) - torch.cos(angle))
    half = 0.5 * side * gamma
    first = 0.5 * side * (2 * beta + torch.tanh(beta).log())
    log_cosh, log_sinh = half + torch.log1p(torch.exp(-2 * half)), half + torch.log1p(-torch.exp(-2 * half))
    odd, even = slice(0, None, 2), slice(1, None, 2)
    terms = torch.stack((log_cosh[odd].sum(), log_sinh[odd].sum(), log_cosh[even].sum(), log_sinh[even].sum()))
    top = terms.max()
    one = torch.ones_like(beta)
    weights = torch.stack((one, one, 2 * torch.cosh(first), 2 * torch.sinh(first)))
    total = top + (weights * torch.exp(terms - top)).sum().log()
    return total - math.log(2) + 0.5 * side**2 * (2 * torch.sinh(2 * beta)).log()
