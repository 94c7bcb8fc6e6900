"""Sampling `ising-16` by sweeps and one site at a time, and its physics: `python -m benchmarks.ising [PART]`.

sampling: seconds and agreement on the same noise. "full passes" is sequential decoding as in libraries
    without a cache: one pass over all sites per site. All but selective sweeps are timed on fewer samples,
    and the seconds for all are in proportion.
physics: the report of `jacobiflow evaluate ising-16 --json`.
maf: the same for the paper's 8-block affine MAF (needs --maf, the folder of `jacobiflow train ising-maf`).

Figures are written into --out, which keeps the parts that are not measured. `--card` writes the card of the
bundled model from them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow_lab.lattice.evaluation import evaluate
from jacobiflow_lab.paper.maf import full_passes

PARTS = ("sampling", "physics", "maf")
CARD = Path("models/src/jacobiflow_models/ising-16/README.md")


def seconds(run: Callable[[Tensor], object], flow: jf.Flow, n: int, batch: int) -> float:
    """Seconds of decoding n samples, `batch` at a time, from noise that is drawn before."""
    z = flow.noise(min(n, batch), seed=1)
    run(z[:8])  # warm up
    total = 0.0
    for start in range(0, n, batch):
        began = time.perf_counter()
        run(z[: n - start])
        total += time.perf_counter() - began
    return total


def sampling(flow: jf.Flow, args: argparse.Namespace) -> dict[str, Any]:
    z = flow.noise(args.check, seed=0)
    exact, swept = flow.decode(z, "sequential"), flow.decode(z, "selective")
    doc: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sweeps_a_block": [b.sweeps.double().mean().item() for b in swept.stats.blocks],
        "agreement": {
            "samples": args.check,
            "largest_deviation": (swept.x - exact.x).abs().max().item(),
            "largest_deviation_of_log_det": (swept.log_det - exact.log_det).abs().max().item(),
            "spread_of_x": exact.x.std().item(),
        },
        "rows": [],
    }

    def by(plan: str) -> Callable[[Tensor], object]:
        return lambda z: flow.decode(z, plan)

    runs: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
        "selective sweeps": (by("selective"), args.samples, args.batch),
        "sequential": (by("sequential"), args.sequential, args.batch),
        "full passes": (lambda z: full_passes(flow, z), args.full_passes, args.batch),
        "selective sweeps, 64": (by("selective"), 320, 64),
        "sequential, 64": (by("sequential"), 320, 64),
        "selective sweeps, one": (by("selective"), 5, 1),
        "sequential, one": (by("sequential"), 5, 1),
    }
    for name, (run, n, batch) in runs.items():
        if n:
            took = seconds(run, flow, n, batch)
            row = {"method": name, "samples": n, "batch": batch, "seconds": took}
            row["seconds_for_all"] = took / n * args.samples
            doc["rows"].append(row)
            print(f"{name:22s} {n:7d} samples, batch {batch:5d} {took:9.3f} s", flush=True)
    print(json.dumps(doc["agreement"]))
    return doc


def physics(flow: jf.Flow, samples: int, batch: int) -> dict[str, Any]:
    doc = evaluate(flow, samples=samples, batch=batch).to_dict()
    print(json.dumps(doc, indent=2))
    return doc


def maf(run: Path, samples: int, batch: int) -> dict[str, Any]:
    flow = jf.load(run / "model")
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = max(e["step"] for e in entries if "step" in e)
    count = sum(p.numel() for p in flow.parameters())
    return {"parameters": count, "steps": steps} | physics(flow, samples, batch)


def card(doc: dict[str, Any]) -> str:
    """The bundled model's card."""
    flow, own = jf.load("ising-16"), doc["physics"]
    count = sum(p.numel() for p in flow.parameters())
    return f"""---
library_name: jacobiflow
license: mit
tags: [normalizing-flow, ising-model]
datasets: [ising]
quality: energy off by {abs(own["energy_per_site"] - own["exact_energy_per_site"]):.3f}
---
# ising-16

Spline flow of the Ising model on a 16 x 16 torus at T = 3, trained by reverse KL through its own swept
samples. {count:,} parameters. Samples are fields of the Hubbard-Stratonovich transform, [N, 256]; given a
field, spins are independent, P(s_i = 1) = 1 / (1 + exp(-2 phi_i)), and their joint law is the Ising model's.

```python
import jacobiflow as jf
flow = jf.load("ising-16")
```

Its family, `lattice`, is part of jacobiflow-lab: `pip install ./lab` in the checkout.

## Samples
![40 fields of seed 0, black to white from the smallest to the largest value](samples.png)

`python -m benchmarks.model_cards` draws this picture.

## Recipe
`jacobiflow train ising` uses the density and no data. A fixed linear map is the normal part of the fields.
The network sees three sites in each direction and is the same around every site. Sites come in 16 classes
that do not see each other, so that a block samples in 16 steps. The log of the training was not kept, so
there is no curve.

{_physics_lines(doc)}
{_sampling_lines(doc["sampling"]) if "sampling" in doc else ""}
## Licence
The weights are under the MIT licence, like the code. There are no data.
"""


def _physics_lines(doc: dict[str, Any]) -> str:
    own, paper = doc["physics"], doc.get("maf")

    def cell(found: dict[str, Any] | None, name: str) -> str:
        return "" if found is None else f"{found[name]:.5g} ± {found[name + '_error']:.1g}"

    known = {
        "energy_per_site": f"{own['exact_energy_per_site']:.6f} (exact)",
        "abs_magnetization": f"{cell(own, 'monte_carlo_abs_magnetization')} (Monte Carlo)",
        "effective_sample_size": "1",
        "log_z_bound": f"{own['exact_log_z']:.4f} (exact log Z)",
    }
    lines = [
        "## Physics of raw samples",
        f"By `jacobiflow evaluate ising-16 --json` ({own['samples']:,} samples) and, for the MAF, "
        "`jacobiflow train ising-maf --out runs/ising-maf`, then "
        '`make bench ARGS="ising maf --maf runs/ising-maf"`' + (f" ({paper['samples']:,} samples)." if paper else "."),
        "",
        "| | ising-16 | the paper's 8-block affine MAF, as measured | known |",
        "|---|---|---|---|",
        *(f"| `{name}` | {cell(own, name)} | {cell(paper, name)} | {k} |" for name, k in known.items()),
        "",
        "Reweighted by p / q, samples of ising-16 give an energy of "
        f"{cell(own, 'reweighted_energy_per_site')}, |m| of {cell(own, 'reweighted_abs_magnetization')} and "
        f"log Z of {cell(own, 'reweighted_log_z')}.",
    ]
    if paper:
        lines += [
            f"The MAF has {paper['parameters']:,} parameters and {paper['steps']:,} steps of training. The "
            "paper gives eight affine blocks and nothing else of its flow; it reports an energy of 0.000 and "
            "|m| of 0.050, which are the values of 256 independent spins.",
        ]
    return "\n".join(lines)


def _sampling_lines(doc: dict[str, Any]) -> str:
    agree = doc["agreement"]
    lines = [
        "",
        "## Sampling",
        f'By `make bench ARGS="ising sampling"`, {doc["threads"]} threads of a CPU, torch {doc["torch"]}:',
        "",
        "| decoding | samples timed | batch | seconds | seconds for 100,000 |",
        "|---|---|---|---|---|",
        *(
            f"| {r['method']} | {r['samples']:,} | {r['batch']:,} | {r['seconds']:.2f} | {r['seconds_for_all']:.0f} |"
            for r in doc["rows"]
        ),
        "",
        f"On the same noise, {agree['samples']:,} samples, sequential and swept fields differ by "
        f"{agree['largest_deviation']:.1e} at most (their spread is {agree['spread_of_x']:.2f}), "
        f"log-determinants by {agree['largest_deviation_of_log_det']:.1e}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--sequential", type=int, default=10_000, help="samples to time sequential decoding on")
    parser.add_argument("--full-passes", type=int, default=200, help="samples to time full passes on")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--check", type=int, default=1000, help="samples to compare")
    parser.add_argument("--maf", type=Path, help="folder of a finished `jacobiflow train ising-maf`")
    parser.add_argument("--maf-samples", type=int, default=10_000)
    parser.add_argument("--card", action="store_true", help="write the card, too")
    parser.add_argument("--out", type=Path, default=Path("docs/bench/ising.json"))
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {unknown.pop()}; choose from {', '.join(PARTS)}")
    parts = args.parts or ([] if args.card else [p for p in PARTS if p != "maf" or args.maf])
    if "maf" in parts and args.maf is None:
        parser.error("maf needs --maf, the folder of `jacobiflow train ising-maf`")
    doc: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    flow = jf.load("ising-16")
    if "sampling" in parts:
        doc["sampling"] = sampling(flow, args)
    if "physics" in parts:
        doc["physics"] = physics(flow, args.samples, args.batch)
    if "maf" in parts:
        doc["maf"] = maf(args.maf, args.maf_samples, args.batch)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")
    if args.card:
        CARD.write_text(card(doc), encoding="utf-8")


if __name__ == "__main__":
    main()
