"""Packages that hold autoregressive flows, before and after: `python -m benchmarks.accelerate real`.

Each run is a process of its own, with one model per package and one seed per run. A run gives the seconds of
what is accelerated, the peak memory of the process meanwhile, and samples. How far the runs of different seeds
are apart without acceleration measures the Monte-Carlo error: with acceleration they must be as far apart.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import jacobiflow as jf

Change = Callable[[Any], Any]
Work = tuple[Callable[[], Any], Callable[[Any], Any]]  # what is timed, and samples [n, d] of what it returns
SIZE = 10


def data(n: int) -> Tensor:
    """Features in a chain, each a bent and noisy function of the one before it."""
    x = torch.randn(n, SIZE)
    for t in range(1, SIZE):
        x[:, t] = 0.5 * x[:, t] + torch.sin(x[:, t - 1])
    return x


def pocomc(change: Change, seed: int) -> Work:
    """The Rosenbrock function in 10 dimensions, as in pocoMC's documentation; training is cut short."""
    import pocomc as pc
    from scipy.stats import uniform

    def log_likelihood(x: Any) -> Any:
        return -np.sum(10.0 * (x[:, ::2] ** 2.0 - x[:, 1::2]) ** 2.0 + (x[:, ::2] - 1.0) ** 2.0, axis=1)

    prior = pc.Prior(SIZE * [uniform(-10.0, 20.0)])
    short = {"epochs": 100, "patience": 10}
    sampler = pc.Sampler(
        prior, log_likelihood, vectorize=True, n_effective=256, n_active=128, train_config=short, random_state=seed
    )
    change(sampler)

    def posterior(found: Any) -> Any:
        samples, weights, _, _ = sampler.posterior()
        return samples[np.random.default_rng(0).choice(len(samples), 2000, p=weights)]

    return lambda: sampler.run(n_total=1024, n_evidence=0, progress=False), posterior


def nessai(change: Change, seed: int) -> Work:
    """Samples of a masked autoregressive flow that nessai has trained."""
    from nessai.flowmodel import FlowModel

    with tempfile.TemporaryDirectory() as folder:
        config = {"n_inputs": SIZE, "ftype": "maf", "n_blocks": 4, "n_neurons": 32}
        rng = np.random.default_rng(0)
        model = FlowModel(flow_config=config, training_config={"max_epochs": 30}, output=folder, rng=rng)
        model.initialise()
        model.train(data(2000).numpy(), output=folder, plot=False)
    change(model)
    return lambda: model.sample_and_log_prob(20_000), lambda found: found[0]


def glasflow(change: Change, seed: int) -> Work:
    from glasflow.flows import MaskedAffineAutoregressiveFlow

    flow = MaskedAffineAutoregressiveFlow(n_inputs=SIZE, n_transforms=4, n_neurons=32)
    optimizer, x = torch.optim.Adam(flow.parameters(), 3e-3), data(2000)
    for _ in range(100):
        optimizer.zero_grad()
        (-flow.log_prob(x).mean()).backward()
        optimizer.step()
    flow.eval()
    change(flow)
    return lambda: flow.sample(20_000), lambda found: found


def lampe(change: Change, seed: int) -> Work:
    """Posterior samples of lampe's NPE with a neural spline flow."""
    import zuko
    from lampe.inference import NPE, NPELoss

    estimator = NPE(SIZE, SIZE, build=zuko.flows.NSF, transforms=3, hidden_features=(64, 64))
    loss, optimizer = NPELoss(estimator), torch.optim.Adam(estimator.parameters(), 1e-3)
    for _ in range(100):
        theta = torch.randn(256, SIZE)
        optimizer.zero_grad()
        loss(theta, theta + data(256)).backward()
        optimizer.step()
    change(estimator)
    observed = data(1)[0]
    return lambda: estimator.flow(observed).sample((20_000,)), lambda found: found


def _posterior(change: Change) -> tuple[Any, Tensor, Tensor]:
    """A posterior of sbi's NPE with `maf`, and 200 parameters with an observation each."""
    from sbi.inference import NPE

    prior = torch.distributions.MultivariateNormal(torch.zeros(SIZE), torch.eye(SIZE))
    theta = prior.sample((1000,))
    trainer = NPE(prior, "maf", show_progress_bars=False).append_simulations(theta, theta + data(1000))
    posterior = trainer.build_posterior(trainer.train(max_num_epochs=20))
    change(posterior)
    thetas = prior.sample((200,))
    return posterior, thetas, thetas + data(200)


def sbi(change: Change, seed: int) -> Work:
    """Simulation-based calibration: 200 observations, 1,000 posterior samples each. Compares the ranks."""
    from sbi.diagnostics import run_sbc

    posterior, thetas, xs = _posterior(change)
    return lambda: run_sbc(thetas, xs, posterior, 1000, show_progress_bar=False), lambda found: found[0]


def sbi_tarp(change: Change, seed: int) -> Work:
    """Expected coverage of 200 observations, 1,000 posterior samples each. Compares the coverage."""
    from sbi.diagnostics import run_tarp

    posterior, thetas, xs = _posterior(change)
    run = lambda: run_tarp(thetas, xs, posterior, None, 1000, show_progress_bar=False)  # noqa: E731
    return run, lambda found: found[0][:, None]


def sbi_batched(change: Change, seed: int) -> Work:
    """`sample_batched` of 200 observations, 1,000 posterior samples each."""
    posterior, _, xs = _posterior(change)
    return lambda: posterior.sample_batched((1000,), xs, show_progress_bars=False), lambda found: found.flatten(0, 1)


def nflows_contexts(change: Change, seed: int) -> Work:
    """10,000 contexts with one sample each."""
    from nflows.distributions.normal import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import CompositeTransform
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform as Affine

    flow = Flow(CompositeTransform([Affine(SIZE, 64, SIZE) for _ in range(4)]), StandardNormal([SIZE]))
    optimizer = torch.optim.Adam(flow.parameters(), 1e-3)
    for _ in range(100):
        context = torch.randn(256, SIZE)
        optimizer.zero_grad()
        (-flow.log_prob(context + data(256), context).mean()).backward()
        optimizer.step()
    change(flow.eval())
    context = torch.randn(10_000, SIZE)
    return lambda: flow.sample(1, context), lambda found: found[:, 0]


def zuko_log_prob(change: Change, seed: int) -> Work:
    """`flow(c).rsample_and_log_prob` of 200 contexts, 100 samples each. Compares samples and log-probabilities."""
    import zuko

    flow = zuko.flows.NSF(SIZE, SIZE, transforms=3, hidden_features=(64, 64))
    optimizer = torch.optim.Adam(flow.parameters(), 1e-3)
    for _ in range(100):
        context = torch.randn(256, SIZE)
        optimizer.zero_grad()
        (-flow(context).log_prob(context + data(256)).mean()).backward()
        optimizer.step()
    change(flow)
    context = torch.randn(200, SIZE)
    both = lambda found: torch.cat((found[0], found[1][..., None]), -1).flatten(0, 1)  # noqa: E731
    return lambda: flow(context).rsample_and_log_prob((100,)), both


PACKAGES = (pocomc, nessai, glasflow, lampe, sbi, sbi_tarp, sbi_batched, nflows_contexts, zuko_log_prob)
RUNS = {run.__name__: run for run in PACKAGES}
CHAINS = ("pocomc",)  # a rounding changes which proposals are accepted: equal seeds give other samples


def child(name: str, which: str, seed: int, out: str) -> None:
    """One run. Models are made with the same seed, so that only the samples differ between runs."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    found: list[Any] = []

    def change(model: Any) -> None:
        if which == "after":
            found.append(jf.accelerate(model))

    run, samples = RUNS[name](change, seed)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    with torch.set_grad_enabled(name in CHAINS):  # pocoMC trains meanwhile
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is from here on
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
    np.savez(out, seconds=seconds, peak=peak, samples=np.asarray(samples(result), dtype=np.float64))
    for model in found:
        entries = jf.acceleration(model).entries
        calls = {k: sum(e.calls.get(k, 0) for e in entries) for e in entries for k in e.calls}
        print(f"  {len(entries)} transforms, calls {calls}, passes saved {sum(e.passes_saved for e in entries):,}")


def apart(a: Any, b: Any) -> float:
    """The largest difference of means and standard deviations, in standard errors of independent samples."""
    of_means = np.sqrt(sum(s.var(0) / len(s) for s in (a, b)))
    of_spreads = np.sqrt(sum(s.var(0) / 2 / len(s) for s in (a, b)))
    means, spreads = a.mean(0) - b.mean(0), a.std(0) - b.std(0)
    return float(max(np.abs(means / of_means).max(), np.abs(spreads / of_spreads).max()))


def packages(names: list[str], runs: int) -> list[dict[str, Any]]:
    """A row per package: seconds and peak memory of each run, and how far their samples are apart."""
    rows = []
    for name in names:
        found: dict[str, list[Any]] = {"before": [], "after": []}
        for seed, which in product(range(runs), found):
            with tempfile.NamedTemporaryFile(suffix=".npz") as file:
                subprocess.run([sys.executable, "-m", __name__, name, which, str(seed), file.name], check=True)
                found[which].append(dict(np.load(file.name)))
        row: dict[str, Any] = {"name": name}
        for which, done in found.items():
            row |= {f"{which}_{key}": [float(f"{one[key]:.4g}") for one in done] for key in ("seconds", "peak")}
        before, after = ([one["samples"] for one in done] for done in found.values())
        seeds = [(i, j) for i, j in product(range(runs), repeat=2) if i != j]
        row["ratio"] = statistics.median(row["before_seconds"]) / statistics.median(row["after_seconds"])
        row["apart_before"] = [apart(a, b) for a, b in combinations(before, 2)]
        row["apart_after"] = [apart(before[i], after[j]) for i, j in seeds]
        row["same_seed"] = None if name in CHAINS else max(map(_largest, before, after))
        rows.append(row)
        print(cells(row), flush=True)
    return rows


def _largest(a: Any, b: Any) -> float:
    """The largest |a - b| / max(1, |a|)."""
    return float((np.abs(a - b) / np.maximum(1, np.abs(a))).max())


def cells(row: dict[str, Any]) -> str:
    """A row of the table."""
    before, after = (row[f"apart_{which}"] for which in ("before", "after"))
    parts = [row["name"], *(f"{statistics.median(row[f'{w}_seconds']):.2f} s" for w in ("before", "after"))]
    parts += [f"{row['ratio']:.1f}x", *(f"{max(row[f'{which}_peak']):.0f} MB" for which in ("before", "after"))]
    parts += [f"{statistics.median(some):.2f} ({max(some):.2f})" if some else "" for some in (before, after)]
    return "| " + " | ".join((*parts, "" if row["same_seed"] is None else f"{row['same_seed']:.0e}")) + " |"


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
