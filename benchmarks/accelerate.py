"""`jf.accelerate` against the libraries themselves: `python -m benchmarks.accelerate [PART ...]`.

table: the inverse of flows of nflows, zuko, normflows and Pyro, features x samples; never below 0.95x.
gradients: the same with a backward pass, affine flows of few features.
images: an nflows MAF of 16 x 16 MNIST (needs --data), with noise rows that have no finite inverse.
sbi: posteriors of two moons and of a 10-dimensional linear Gaussian, before and after.
real: other packages and runs with many contexts, before and after (needs pocomc, nessai, glasflow and lampe).

Runs alternate; figures are medians, ratios are to the library's own time on the same noise. table and gradients
are measured with each number of --threads. Figures are written into --out, where parts that are not measured stay
as they are, and from there into docs/accelerate.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import zuko
from nflows.distributions.normal import StandardNormal
from nflows.flows import Flow
from nflows.transforms import CompositeTransform, ReversePermutation
from nflows.transforms import autoregressive as nflows_ar
from torch import Tensor, nn

import jacobiflow as jf
from benchmarks.accelerate_real import RUNS, packages
from benchmarks.accelerate_report import filled, merged, render
from benchmarks.harness import about_machine, busy_elsewhere

Inverse = Callable[[Tensor], Tensor]
PARTS = ("table", "gradients", "images", "sbi", "real")
OUT, PAGE = Path("docs/bench/accelerate.json"), Path("docs/accelerate.md")
RUN_SECONDS = 0.02  # of calls in a row: the first ones find cold caches
FEATURES, SAMPLES = (2, 3, 6, 10, 32, 128), (1, 100, 10_000)
WITH_GRADIENTS = (
    ("nflows affine", "zuko MAF", "normflows affine", "pyro affine"),
    (3, 6, 10, 32),
    (1, 100, 1000),
)


def data(count: int, features: int, seed: int = 0) -> Tensor:
    """Features in a chain, each a bent and noisy function of the two before it; standardised."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, features, generator=draw)
    x = noise.clone()
    for t in range(1, features):
        x[:, t] += torch.sin(2 * x[:, t - 1]) + (0.5 * x[:, t - 2] if t > 1 else 0)
    return (x - x.mean(0)) / x.std(0)


def fit(model: nn.Module, log_prob: Callable[[Tensor], Tensor], x: Tensor, steps: int) -> None:
    """A short maximum-likelihood training, so that the conditioners have something to say."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = x[torch.randint(len(x), (256,), generator=draw)]
        optimizer.zero_grad()
        (-log_prob(rows).mean()).backward()
        optimizer.step()
    model.eval()


def nflows_flow(kind: type[nn.Module], features: int, layers: int, **options: Any) -> Flow:
    steps: list[nn.Module] = []
    for _ in range(layers):
        steps += [kind(features=features, hidden_features=64, **options), ReversePermutation(features)]
    return Flow(CompositeTransform(steps), StandardNormal([features]))


def _nflows(kind: type[nn.Module], **options: Any) -> Callable[[int], tuple[nn.Module, Inverse]]:
    def make(features: int) -> tuple[nn.Module, Inverse]:
        flow = nflows_flow(kind, features, 2, **options)
        fit(flow, flow.log_prob, data(5000, features), 100)
        return flow, lambda z: flow._transform.inverse(z)[0]

    return make


def _zuko(
    name: str, layers: int = 2, hidden: tuple[int, ...] = (64, 64)
) -> Callable[[int], tuple[nn.Module, Inverse]]:
    def make(features: int) -> tuple[nn.Module, Inverse]:
        flow = getattr(zuko.flows, name)(features, transforms=layers, hidden_features=hidden)
        fit(flow, lambda x: flow().log_prob(x), data(5000, features), 100)
        return flow, lambda z: flow().transform.inv(z)

    return make


def _normflows(features: int) -> tuple[nn.Module, Inverse]:
    import normflows as nf

    flow = nn.ModuleList(nf.flows.MaskedAffineAutoregressive(features, 64) for _ in range(2))

    def log_prob(x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for one in flow:
            x, log_det = one(x)
            x, total = x.flip(1), total + log_det
        return total - 0.5 * x.square().sum(1)

    def inverse(z: Tensor) -> Tensor:
        for one in reversed(flow):  # type: ignore[call-overload]
            z = one.inverse(z.flip(1))[0]
        return z

    fit(flow, log_prob, data(5000, features), 100)
    return flow, inverse


def _pyro(features: int) -> tuple[nn.Module, Inverse]:
    import pyro.distributions.transforms as transforms

    transform = transforms.affine_autoregressive(features, [max(64, features)])
    fit(
        transform,
        lambda x: transform.log_abs_det_jacobian(x, y := transform(x)) - 0.5 * y.square().sum(1),
        data(5000, features),
        100,
    )
    return transform, lambda z: transform._inverse(z)


FLOWS: dict[str, Callable[[int], tuple[nn.Module, Inverse]]] = {
    "nflows affine": _nflows(nflows_ar.MaskedAffineAutoregressiveTransform),
    "nflows spline": _nflows(
        nflows_ar.MaskedPiecewiseRationalQuadraticAutoregressiveTransform, tails="linear", tail_bound=4.0
    ),
    "zuko MAF": _zuko("MAF"),
    "zuko NSF": _zuko("NSF"),
    "normflows affine": _normflows,
    "pyro affine": _pyro,
}


def differentiated(model: nn.Module, inverse: Inverse) -> Inverse:
    """As `inverse`, with the gradients of a loss with respect to all weights."""
    weights = list(model.parameters())

    def run(z: Tensor) -> Tensor:
        x = inverse(z)
        torch.autograd.grad(x.square().sum(), weights, allow_unused=True)
        return x.detach()

    return run


def compare(model: nn.Module, inverse: Inverse, z: Tensor, budget: float) -> dict[str, float]:
    """Pairs of runs, theirs and ours in turn, as many as fit into `budget` seconds, one at least; four times
    as many where ours look slower, because near 1 the noise decides.

    The ratio is the median over all pairs. A run is as many calls as take RUN_SECONDS and more."""
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    outs: dict[str, Tensor] = {}
    jf.restore(model)
    once, outs["theirs"] = timed(lambda: inverse(z), 1)
    calls = max(1, min(200, round(RUN_SECONDS / once)))
    turns = [("theirs", jf.restore), ("ours", jf.accelerate)]
    if once > budget:  # one run is long enough, and all there is time for
        seconds["theirs"].append(once)
        turns = turns[1:]

    def ratio() -> float:
        return statistics.median(a / b for a, b in zip(seconds["theirs"], seconds["ours"], strict=True))

    began = time.perf_counter()
    while not seconds["ours"] or (len(turns) > 1 and time.perf_counter() - began < budget * (1 if ratio() > 1 else 4)):
        for name, change in turns:
            change(model)
            timed(lambda: inverse(z), calls)  # packs the weights; caches are cold after the change
            took, outs[name] = timed(lambda: inverse(z), calls)
            seconds[name].append(took)
        turns.reverse()
    jf.restore(model)
    slow, fast = (statistics.median(seconds[name]) for name in ("theirs", "ours"))
    ours, theirs = outs["ours"], outs["theirs"]
    error = ((ours - theirs).abs() / theirs.abs().clamp_min(1)).max().item()
    return {
        "theirs_s": slow,
        "ours_s": fast,
        "ratio": ratio(),
        "deviation": error,
        "pairs": len(seconds["ours"]),
    }


def timed(run: Callable[[], Tensor], calls: int) -> tuple[float, Tensor]:
    """Seconds a call, and what the last one returned."""
    start = time.perf_counter()
    for _ in range(calls):
        out = run()
    return (time.perf_counter() - start) / calls, out


def table(
    names: Sequence[str], features: Sequence[int], samples: Sequence[int], budget: float, gradients: bool
) -> list[dict[str, Any]]:
    rows = []
    print(f"threads: {torch.get_num_threads()}")
    print(f"{'':18s} {'features':>8s}" + "".join(f"{f'{n} samples':>26s}" for n in samples))
    for name in names:
        for d in features:
            torch.manual_seed(0)
            model, inverse = FLOWS[name](d)
            line = f"{name:18s} {d:8d}"
            for n in samples:
                z = torch.randn(n, d, generator=torch.Generator().manual_seed(2))
                with torch.set_grad_enabled(gradients):
                    run = differentiated(model, inverse) if gradients else inverse
                    row = {"flow": name, "features": d, "samples": n, "threads": torch.get_num_threads()}
                    row |= compare(model, run, z, budget)
                rows.append(row)
                line += f"{row['ratio']:9.2f}x {1e3 * row['ours_s']:8.2f} ms{row['deviation']:6.0e}"
            print(line, flush=True)
    least = min(rows, key=lambda r: r["ratio"])
    print(f"least: {least['ratio']:.2f}x ({least['flow']}, {least['features']} x {least['samples']})")
    return rows


def digits(path: Path) -> Tensor:
    """MNIST at 16 x 16, dequantised, in [-1, 1]."""
    from jacobiflow.data.sources import DataConfig, load_images

    images = load_images(DataConfig(source=str(path)), image_size=28, channels=1)[0].pixels
    x = F.interpolate(images.float(), size=(16, 16), mode="area").flatten(1)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return (x + noise) / 128 - 1


def image_flow(path: Path, store: Path, epochs: int) -> Flow:
    torch.manual_seed(0)
    steps: list[nn.Module] = []
    for _ in range(8):
        steps += [
            nflows_ar.MaskedAffineAutoregressiveTransform(256, 512, num_blocks=1),
            ReversePermutation(256),
        ]
    flow = Flow(CompositeTransform(steps), StandardNormal([256]))
    if store.exists():
        flow.load_state_dict(torch.load(store))
        return flow.eval()
    x = digits(path)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    for epoch in range(epochs):
        total, parts = 0.0, torch.randperm(len(x), generator=draw).split(256)
        for rows in parts:
            optimizer.zero_grad()
            loss = -flow.log_prob(x[rows]).mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"  epoch {epoch + 1}: {total / len(parts):.1f} nats", flush=True)
    store.parent.mkdir(parents=True, exist_ok=True)
    torch.save(flow.state_dict(), store)
    return flow.eval()


def images(path: Path, store: Path, epochs: int, samples: int) -> dict[str, Any]:
    flow = image_flow(path, store, epochs).requires_grad_(False)
    z = torch.randn(samples, 256, generator=torch.Generator().manual_seed(3))
    start = time.perf_counter()
    theirs = flow._transform.inverse(z)[0]
    slow = time.perf_counter() - start
    good = theirs.isfinite().all(1)
    with jf.accelerated(flow), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flow._transform.inverse(z)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            ours = flow._transform.inverse(z)[0]
            seconds.append(time.perf_counter() - start)
    with jf.accelerated(flow.double()):
        exact = flow._transform.inverse(z.double())[0].float()
    flow.float()
    scale = theirs[good].abs().clamp_min(1)
    fast = statistics.median(seconds)
    found = {
        "samples": samples,
        "bad_rows": int((~good).sum()),
        "same_rows": bool(torch.equal(ours.isfinite().all(1), good)),
        "ours_finite_theirs_not": int((ours.isfinite().all(1) & ~good).sum()),
        "theirs_finite_ours_not": int((~ours.isfinite().all(1) & good).sum()),
        "epochs": epochs,
        "theirs_s": slow,
        "ours_s": fast,
        "ratio": slow / fast,
        "deviation": ((ours - theirs)[good].abs() / scale).max().item(),
        "deviation_median_row": ((ours - theirs)[good].abs() / scale).amax(1).median().item(),
        "their_error": ((theirs - exact)[good].abs() / scale).max().item(),
        "our_error": ((ours - exact)[good].abs() / scale).max().item(),
    }
    print(json.dumps(found, indent=2))
    return found


def two_moons(theta: Tensor) -> Tensor:
    """Greenberg et al., 2019: a crescent whose place depends on |theta|."""
    angle = torch.pi * (torch.rand(len(theta)) - 0.5)
    radius = 0.1 + 0.01 * torch.randn(len(theta))
    crescent = torch.stack((radius * angle.cos() + 0.25, radius * angle.sin()), 1)
    return crescent + torch.stack((-theta.sum(1).abs(), theta[:, 1] - theta[:, 0]), 1) / 2**0.5


def linear_gaussian(theta: Tensor) -> Tensor:
    return theta + 0.3 * torch.randn_like(theta)


def posteriors(simulations: int, samples: int) -> list[dict[str, Any]]:
    from sbi.inference import NPE
    from sbi.utils import BoxUniform

    rows = []
    tasks = {"two moons": (two_moons, 2, 0.0), "linear Gaussian": (linear_gaussian, 10, 0.2)}
    for name, (simulate, size, at) in tasks.items():
        torch.manual_seed(0)
        prior = BoxUniform(-torch.ones(size), torch.ones(size))
        theta = prior.sample((simulations,))
        trainer = NPE(prior, density_estimator="maf", show_progress_bars=False)
        trainer.append_simulations(theta, simulate(theta)).train(max_num_epochs=60)
        posterior = trainer.build_posterior().set_default_x(torch.full((1, size), at))
        found: dict[str, Tensor] = {}
        seconds = {}
        for which, change in (("theirs", jf.restore), ("ours", jf.accelerate)):
            change(posterior)
            posterior.sample((10,), show_progress_bars=False)
            torch.manual_seed(1)
            start = time.perf_counter()
            found[which] = posterior.sample((samples,), show_progress_bars=False)
            seconds[which] = time.perf_counter() - start
        error = found["theirs"].std(0) / samples**0.5
        row = {
            "task": name,
            "samples": samples,
            "theirs_s": seconds["theirs"],
            "ours_s": seconds["ours"],
            "ratio": seconds["theirs"] / seconds["ours"],
            "deviation": (found["ours"] - found["theirs"]).abs().max().item(),
            "mean_gap_in_errors": ((found["ours"].mean(0) - found["theirs"].mean(0)) / error).abs().max().item(),
            "std_ratio": (found["ours"].std(0) / found["theirs"].std(0)).tolist(),
        }
        rows.append(row)
        print(
            f"sbi maf, {name}, {samples} samples: {row['theirs_s']:.2f} s -> {row['ours_s']:.2f} s, "
            f"{row['ratio']:.1f}x, largest deviation {row['deviation']:.1e}, "
            f"means differ by {row['mean_gap_in_errors']:.3f} standard errors",
            flush=True,
        )
    return rows


def machine() -> dict[str, Any]:
    """Where figures come from."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--flows", nargs="+", choices=FLOWS, default=list(FLOWS))
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES)
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="for table and gradients")
    parser.add_argument("--packages", nargs="+", choices=RUNS, default=list(RUNS), help="for real")
    parser.add_argument("--runs", type=int, default=3, help="seeds of each package, for real")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of alternating runs a figure")
    parser.add_argument("--data", type=Path, help="MNIST as an npz file, for images")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000, help="noise rows, for images")
    parser.add_argument("--store", type=Path, default=Path("out/accelerate-images.pt"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {unknown.pop()}; choose from {', '.join(PARTS)}")
    parts = args.parts or [p for p in PARTS if p != "real" and (p != "images" or args.data)]
    doc: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    doc["machine"] = machine()
    for part, choice in (("table", (args.flows, args.features, args.samples)), ("gradients", WITH_GRADIENTS)):
        for threads in args.threads if part in parts else ():
            torch.set_num_threads(threads)
            rows = table(*choice, args.budget, part == "gradients")
            doc[part] = merged(doc.get(part, []), rows, list(FLOWS))
    torch.set_num_threads(doc["machine"]["threads"])
    if "images" in parts:
        doc["images"] = images(args.data, args.store, args.epochs, args.images)
    if "sbi" in parts:
        doc["sbi"] = posteriors(2000, 10_000)
    if "real" in parts:
        began, others = time.perf_counter(), busy_elsewhere()
        doc["real"] = about_machine() | {"rows": packages(args.packages, args.runs)}
        doc["real"]["busy_elsewhere"] = round((busy_elsewhere() - others) / (time.perf_counter() - began), 2)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")
    if args.out == OUT:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), doc), encoding="utf-8")
    else:
        print(render(doc))


if __name__ == "__main__":
    main()
