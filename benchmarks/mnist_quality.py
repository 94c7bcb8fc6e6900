"""How good the bundled MNIST models are: `python -m benchmarks.mnist_quality --data mnist.npz`.

1. `mnist` as a classifier by Bayes' rule: argmax over y of log p(x + noise | y) on the test digits.
2. Its samples judged by a convolutional classifier that is trained here, on the same training images.
3. `mnist-maf`: test log-likelihood, and the share of noise rows with no finite inverse.

Everything is printed and written as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jacobiflow as jf
from jacobiflow.data.decoding import Images
from jacobiflow.data.sources import DataConfig, load_images
from jacobiflow.data.transforms import prepare


def bayes_accuracy(flow: jf.Flow, test: Images, count: int, batch: int = 250) -> dict[str, Any]:
    """Share of test digits whose own label has the largest likelihood, with training's noise on them."""
    draw = torch.Generator().manual_seed(0)
    right, gain, done = 0, 0.0, 0
    bits: list[Tensor] = []
    for lo in range(0, count, batch):
        index = torch.arange(lo, min(lo + batch, count))
        found = prepare(test, index, draw, noise="gaussian", noise_std=flow.config.noise_std)
        with torch.no_grad():
            scores = torch.stack([flow.log_prob(found.x, labels=y) for y in range(10)], 1)
        own = scores.gather(1, found.labels[:, None])[:, 0]
        right += int((scores.argmax(1) == found.labels).sum())
        gain += float((own - scores.logsumexp(1) + torch.tensor(10.0).log()).sum())
        bits.append(-own / 784)
        done += len(index)
        print(f"\r  {done}/{count} digits: {100 * right / done:.2f}%", end="", flush=True)
    print()
    return {
        "digits": count,
        "accuracy": right / count,
        "label_gain_nats": gain / count,
        "nll_nats_per_dim": torch.cat(bits).mean().item(),
    }


class Judge(nn.Module):
    """A small convolutional classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 24, 5, stride=2), nn.Conv2d(24, 48, 3, stride=2)
        self.out = nn.Linear(48 * 25, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.out(h.flatten(1))


def train_judge(train: Images, test: Images, epochs: int) -> tuple[Judge, float]:
    """The judge and its accuracy on the test digits. It sees clean and noisy digits alike."""
    torch.manual_seed(0)
    judge = Judge()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(train) // 128))
    draw = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        order = torch.randperm(len(train), generator=draw)
        for i in range(len(train) // 128):
            index = order[i * 128 : (i + 1) * 128]
            found = prepare(train, index, draw, noise="gaussian", noise_std=0.1 * (i % 2))
            loss = F.cross_entropy(judge(found.x), found.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        x = test.pixels.float() / 127.5 - 1
        accuracy = (judge(x).argmax(1) == test.labels).double().mean().item()
    return judge, accuracy


def judged_samples(flow: jf.Flow, judge: Judge, count: int) -> dict[str, Any]:
    """Share of samples that the judge gives the label they were asked for."""
    labels = torch.arange(count) % 10
    rows: dict[str, Any] = {"samples": count}
    settings = {
        "sequential": {"plan": "sequential"},
        "selective": {"plan": "selective", "tol": 0.5},
        "selective_denoised": {"plan": "selective", "tol": 0.5, "denoise": True},
        "guided": {"plan": "selective", "tol": 0.5, "guidance": 1.0},
    }
    for name, options in settings.items():
        x = flow.sample(count, labels=labels, seed=0, **options).x
        with torch.no_grad():
            found = judge(x).argmax(1)
        rows[name] = (found == labels).double().mean().item()
        print(f"  {name}: {100 * rows[name]:.1f}% of {count} samples are of the class asked for")
    return rows


def maf_quality(flow: jf.Flow, test: Images, count: int, noise_rows: int) -> dict[str, Any]:
    """Test log-likelihood in nats, and how many rows of noise have no finite inverse."""
    draw = torch.Generator().manual_seed(0)
    found = prepare(test, torch.arange(count), draw, noise="binary")
    with torch.no_grad():
        nats = torch.cat([flow.log_prob(part) for part in found.x.flatten(1).split(500)])
    out = flow.sample(noise_rows, seed=0, plan="sequential")
    lost = int((~out.x.isfinite().all(1)).sum())
    print(f"  log-likelihood {nats.mean():.2f} nats per image; {lost} of {noise_rows} noise rows not finite")
    return {
        "images": count,
        "log_likelihood_nats": nats.mean().item(),
        "standard_error": (nats.std() / count**0.5).item(),
        "noise_rows": noise_rows,
        "not_finite": lost,
        "largest": out.x[out.x.isfinite().all(1)].abs().max().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mnist.npz", help="MNIST as an npz file")
    parser.add_argument("--digits", type=int, default=10_000, help="test digits for Bayes' rule")
    parser.add_argument("--samples", type=int, default=500, help="samples to judge")
    parser.add_argument("--model", default="mnist", help="a class-conditional TarFlow of MNIST; 'none' skips it")
    parser.add_argument("--maf", default="mnist-maf", help="a MAF of binarised MNIST; 'none' skips it")
    parser.add_argument("--out", type=Path, default=Path("out/mnist_quality.json"))
    args = parser.parse_args()
    train, test = load_images(DataConfig(source=args.data), image_size=28, channels=1, num_classes=10)
    doc: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if args.model != "none":
        flow = jf.load(args.model)
        judge, accuracy = train_judge(train, test, epochs=2)
        print(f"the judge is right on {100 * accuracy:.2f}% of the test digits")
        doc["judge"] = accuracy
        doc["samples"] = judged_samples(flow, judge, args.samples)
        doc["bayes"] = bayes_accuracy(flow, test, min(args.digits, len(test)))
    if args.maf != "none":
        doc["maf"] = maf_quality(jf.load(args.maf), test, len(test), noise_rows=1000)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
