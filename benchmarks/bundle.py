"""A finished run as a bundled model: `python -m benchmarks.bundle RUN NAME --recipe RECIPE --data DATA`.

Stores the weights in half precision, measures what that changes, and writes the card: data, recipe,
training log, measured figures, and its pictures. DATA is one of the data sets that may be redistributed.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import jacobiflow as jf
from benchmarks.model_cards import count_sweeps, draw_samples, draw_training
from jacobiflow.core.pictures import save_images
from jacobiflow.training.recipe import Recipe

LARGEST = 20_000_000  # bytes of a bundled folder


@dataclass(frozen=True)
class Data:
    """What a card says about the data."""

    tag: str  # of the hub
    source: str
    text: str
    figures: str  # the command that measured what --quality has


DATA = {
    "mnist": Data(
        "mnist",
        "mnist.npz",
        "All 60,000 training images of MNIST (LeCun et al.); validation and figures are on the 10,000 test images.",
        "python -m benchmarks.mnist_quality",
    ),
    "cifar10": Data(
        "cifar10",
        "cifar10-full.npz",
        "All 50,000 training images of CIFAR-10 (Krizhevsky, 2009); validation and figures are on the 10,000 test "
        "images.",
        "jacobiflow evaluate",
    ),
    "cifar10-part": Data(
        "cifar10",
        "cifar10.npz",
        "The first 14,000 training images of CIFAR-10 (Krizhevsky, 2009); validation is on the first 3,000 "
        "test images.",
        "jacobiflow reproduce",
    ),
    "cifar100": Data(
        "cifar100",
        "cifar100.npz",
        "8,000 training images of CIFAR-100 with fine labels (Krizhevsky, 2009), not of the official split; "
        "validation is on 2,000 others.",
        "jacobiflow reproduce",
    ),
}


def half_precision(flow: jf.Flow, folder: Path, n: int = 64) -> dict[str, float]:
    """How far samples move, on the same noise, if the weights are stored in half precision."""
    flow.save(folder, dtype=torch.float16)
    half = jf.load(folder)
    labels = torch.arange(n) % flow.num_classes if flow.num_classes else None
    z = flow.noise(n, seed=0)
    kw: dict[str, Any] = {"labels": labels} if labels is not None else {}
    full, stored = flow.decode(z, "sequential", **kw).x, half.decode(z, "sequential", **kw).x
    off = (full - stored).abs()
    pairs = torch.stack((full, stored), 1).flatten(0, 1)[:32]
    if pairs.ndim == 2:
        side = math.isqrt(pairs.shape[1])
        pairs = pairs.reshape(-1, 1, side, side)
    save_images(pairs, folder / "half_precision.png", columns=16)
    return {"samples": n, "largest": off.max().item(), "mean": off.mean().item()}


def log_table(run: Path, dims: int) -> str:
    """Training and validation loss, an epoch a row."""
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    rows = [
        "| epoch | step | training loss | validation loss | validation nats per image |",
        "|---|---|---|---|---|",
    ]
    for v in (e for e in entries if "validation" in e):
        recent = [e["loss"] for e in entries if "loss" in e and v["step"] - 400 < e["step"] <= v["step"]]
        rows.append(
            f"| {v['epoch']:.0f} | {v['step']} | {sum(recent) / len(recent):.4f} "
            f"| {v['validation']:.4f} | {-v['validation'] * dims:.1f} |"
        )
    return "\n".join(rows)


def card(
    name: str,
    flow: jf.Flow,
    recipe: str,
    run: Path,
    data: Data,
    notes: str,
    headline: str,
    figures: dict[str, Any],
) -> str:
    """The model card. headline: its quality in a few words, for the table of models."""
    about = Recipe.load(recipe)
    count = sum(p.numel() for p in flow.parameters())
    dims = math.prod(flow.data_shape)
    listing = json.dumps(figures, indent=2)
    own = figures.keys() <= {"half_precision", "sweeps"}
    source = "`python -m benchmarks.bundle`" if own else f"`{data.figures}` and `python -m benchmarks.bundle`"
    return f"""---
library_name: jacobiflow
license: mit
tags: [normalizing-flow]
datasets: [{data.tag}]
quality: {headline}
---
# {name}

{about.about} {count:,} parameters, stored in half precision, used in float32.

```python
import jacobiflow as jf
flow = jf.load("{name}")
```

## Samples
![40 exact samples of seed 0, the classes in turn](samples.png)

`python -m benchmarks.model_cards` draws the pictures of this card.

## Data and recipe
{data.text}
Recipe `{recipe}`: `jacobiflow train {recipe} --data.source {data.source}`. {notes}

## Training log
Losses are nats per dimension of the noised data, over the last 400 steps for training and on 1,000 held-out
images for validation.

![Loss per epoch](training.png)

{log_table(run, dims)}

## Measured figures
By {source}; deviations are of samples
from the same noise, in data units (images span [-1, 1]).

```json
{listing}
```

## Licence
The weights are under the MIT licence, like the code. The data are not part of this package: their own terms
apply.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished `jacobiflow train`")
    parser.add_argument("name", help="bundled name")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", choices=DATA, default="mnist", help="what it was trained on")
    parser.add_argument("--quality", type=Path, help="JSON with more figures for the card")
    parser.add_argument("--headline", required=True, help="the quality in a few words, for jf.models()")
    parser.add_argument("--notes", default="", help="a sentence for the card")
    parser.add_argument("--out", type=Path, default=Path("models/src/jacobiflow_models"))
    args = parser.parse_args()
    flow, folder = jf.load(args.run / "model"), args.out / args.name
    figures: dict[str, Any] = {"half_precision": half_precision(flow, folder)}
    half = jf.load(folder)
    figures["sweeps"] = count_sweeps(half)
    if args.quality:
        figures |= json.loads(args.quality.read_text())
    data = DATA[args.data]
    text = card(args.name, flow, args.recipe, args.run, data, args.notes, args.headline, figures)
    flow.save(folder, dtype=torch.float16, card=text)
    draw_samples(half, folder / "samples.png")
    draw_training(text, folder / "training.png")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(json.dumps(figures, indent=2))
    print(f"{folder}: {size / 1e6:.2f} MB")
    if size > LARGEST:
        parser.exit(1, f"{folder} is larger than the {LARGEST / 1e6:g} MB that a bundled model may have\n")


if __name__ == "__main__":
    main()
