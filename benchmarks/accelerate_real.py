"""Packages that hold autoregressive flows, before and after: `python -m benchmarks.accelerate_real`.

Each package runs in a process of its own: before, after, and before with another seed. It prints the seconds
of what is accelerated, the peak memory of the process, and how far the means are apart. Samples of a package
may depend on each other, so two seeds of the original stand beside it. Install pocomc, nessai, glasflow, sbi
and lampe first.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import jacobiflow as jf

Change = Callable[[Any], Any]
SIZE = 10


def data(n: int) -> Tensor:
    """Features in a chain, each a bent and noisy function of the one before it."""
    x = torch.randn(n, SIZE)
    for t in range(1, SIZE):
        x[:, t] = 0.5 * x[:, t] + torch.sin(x[:, t - 1])
    return x


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = run()
    return time.perf_counter() - began, found


def pocomc(change: Change) -> tuple[float, Any]:
    """The Rosenbrock function in 10 dimensions, as in pocoMC's documentation."""
    import pocomc as pc
    from scipy.stats import uniform

    def log_likelihood(x: Any) -> Any:
        return -np.sum(10.0 * (x[:, ::2] ** 2.0 - x[:, 1::2]) ** 2.0 + (x[:, ::2] - 1.0) ** 2.0, axis=1)

    prior = pc.Prior(SIZE * [uniform(-10.0, 20.0)])
    sampler = pc.Sampler(
        prior,
        log_likelihood,
        vectorize=True,
        n_effective=256,
        n_active=128,
        random_state=torch.initial_seed(),
    )
    change(sampler)
    seconds, _ = timed(lambda: sampler.run(n_total=1024, n_evidence=0, progress=False))
    samples, weights, _, _ = sampler.posterior()
    return seconds, samples[np.random.default_rng(0).choice(len(samples), 2000, p=weights)]


def nessai(change: Change) -> tuple[float, Any]:
    """Samples of a masked autoregressive flow that nessai has trained."""
    from nessai.flowmodel import FlowModel

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        config = {"n_inputs": SIZE, "ftype": "maf", "n_blocks": 4, "n_neurons": 32}
        model = FlowModel(flow_config=config, training_config={"max_epochs": 30}, output=folder, rng=rng)
        model.initialise()
        model.train(data(2000).numpy(), output=folder, plot=False)
        change(model)
        return timed(lambda: model.sample_and_log_prob(20_000)[0])


def glasflow(change: Change) -> tuple[float, Any]:
    from glasflow.flows import MaskedAffineAutoregressiveFlow

    flow = MaskedAffineAutoregressiveFlow(n_inputs=SIZE, n_transforms=4, n_neurons=32)
    optimizer, x = torch.optim.Adam(flow.parameters(), 3e-3), data(2000)
    for _ in range(100):
        optimizer.zero_grad()
        (-flow.log_prob(x).mean()).backward()
        optimizer.step()
    flow.eval()
    change(flow)
    with torch.no_grad():
        return timed(lambda: flow.sample(20_000))


def sbi(change: Change) -> tuple[float, Any]:
    """Simulation-based calibration: 200 observations, 1000 posterior samples each."""
    from sbi.diagnostics import run_sbc
    from sbi.inference import NPE

    prior = torch.distributions.MultivariateNormal(torch.zeros(SIZE), torch.eye(SIZE))
    theta = prior.sample((1000,))
    trainer = NPE(prior, "maf", show_progress_bars=False).append_simulations(theta, theta + data(1000))
    posterior = trainer.build_posterior(trainer.train(max_num_epochs=20))
    change(posterior)
    thetas = prior.sample((200,))
    run = lambda: run_sbc(thetas, thetas + data(200), posterior, 1000, show_progress_bar=False)  # noqa: E731
    seconds, (ranks, _) = timed(run)
    return seconds, ranks


def lampe(change: Change) -> tuple[float, Any]:
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
    with torch.no_grad():
        return timed(lambda: estimator.flow(data(1)[0]).sample((20_000,)))


RUNS = {run.__name__: run for run in (pocomc, nessai, glasflow, sbi, lampe)}


def child(name: str, which: str, seed: str, out: str) -> None:
    torch.manual_seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002
    warnings.simplefilter("ignore")
    found: list[Any] = []

    def change(model: Any) -> None:
        if which == "after":
            found.append(jf.accelerate(model))

    seconds, samples = RUNS[name](change)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    np.savez(out, seconds=seconds, peak=peak, samples=np.asarray(samples, dtype=np.float64))
    for model in found:
        entries = jf.acceleration(model).entries
        calls = {k: sum(e.calls.get(k, 0) for e in entries) for e in entries for k in e.calls}
        saved = sum(e.passes_saved for e in entries)
        print(f"  {len(entries)} transforms, calls {calls}, passes saved {saved:,}")


def apart(a: Any, b: Any) -> float:
    """The largest difference of means, in standard errors of independent samples."""
    error = sum(s.var(0) / len(s) for s in (a, b)) ** 0.5
    return float(np.max(np.abs(a.mean(0) - b.mean(0)) / error))


def main(names: list[str]) -> None:
    for name in names:
        docs: dict[tuple[str, int], Any] = {}
        for which, seed in (("before", 0), ("after", 0), ("before", 1)):
            with tempfile.NamedTemporaryFile(suffix=".npz") as file:
                command = [sys.executable, "-m", __spec__.name, name, which, str(seed), file.name]
                subprocess.run(command, check=True)
                docs[which, seed] = dict(np.load(file.name))
        a, b, other = docs.values()
        print(
            f"{name}: {a['seconds']:.2f} s -> {b['seconds']:.2f} s, {a['seconds'] / b['seconds']:.1f}x; "
            f"peak {a['peak']:.0f} MB -> {b['peak']:.0f} MB; means {apart(a['samples'], b['samples']):.2f} "
            f"standard errors apart, two seeds of the original {apart(a['samples'], other['samples']):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 5 and Path(sys.argv[4]).suffix == ".npz":
        child(*sys.argv[1:])
    else:
        main(sys.argv[1:] or list(RUNS))
