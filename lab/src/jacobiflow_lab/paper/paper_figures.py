"""The paper's own numbers, as it prints them: Zhang et al., Accelerating Inference of Discrete
Autoregressive Normalizing Flows by Selective Jacobi Decoding, TMLR 2026. Nothing here was measured by us.

Its times are of two L40S GPUs, batch 256. It prints no numbers beside its plots; what those show is in
words, with each item.
"""

from __future__ import annotations

from jacobiflow_lab.paper.item import Table

DATA = ("CIFAR-10", "CIFAR-100", "AFHQ")

# Table 1: seconds a batch (with the largest deviation in three runs), speed-up, FID, CLIP-IQA, BRISQUE.
COMPARISON: dict[str, dict[str, tuple[float, float | None, float, float, float, float]]] = {
    "CIFAR-10": {
        "sequential": (9.56, 0.42, 1.0, 9.71, 0.35, 56.35),
        "uniform": (3.92, 0.09, 2.4, 10.19, 0.35, 56.79),
        "selective": (2.63, 0.13, 3.6, 10.20, 0.35, 56.78),
    },
    "CIFAR-100": {
        "sequential": (9.57, 0.27, 1.0, 8.22, 0.35, 57.75),
        "uniform": (3.30, 0.10, 2.9, 8.26, 0.35, 57.76),
        "selective": (2.04, 0.03, 4.7, 8.19, 0.35, 57.78),
    },
    "AFHQ": {
        "sequential": (186.28, None, 1.0, 15.42, 0.63, 15.55),
        "uniform": (219.24, None, 0.8, 15.44, 0.63, 15.44),
        "selective": (41.21, None, 4.5, 15.44, 0.63, 15.56),
    },
}
# The largest deviation in three runs of FID, CLIP-IQA and BRISQUE; AFHQ has none.
COMPARISON_SPREAD: dict[str, dict[str, tuple[float, float, float]]] = {
    "CIFAR-10": {
        "sequential": (0.03, 0.00, 0.21),
        "uniform": (0.03, 0.00, 0.20),
        "selective": (0.03, 0.00, 0.19),
    },
    "CIFAR-100": {
        "sequential": (0.03, 0.00, 0.12),
        "uniform": (0.10, 0.00, 0.06),
        "selective": (0.16, 0.00, 0.12),
    },
}

# Table A2.
CONFIGURATION: dict[str, tuple[str, str, str]] = {
    "resolution": ("32 x 32", "32 x 32", "256 x 256"),
    "patch size": ("2", "2", "8"),
    "positions": ("256", "256", "1024"),
    "blocks": ("6", "6", "8"),
    "layers a block": ("6", "6", "8"),
    "width": ("256", "256", "768"),
    "batch size": ("256", "256", "256"),
}

# Table A1, and where the same thing is in this package.
NOTATION = (
    ("x", "observed data", "Decoded.x"),
    ("z_k", "random variable of step k", "input of block k; z of Flow.decode for the last"),
    ("z_k,l", "its sub-variable l", "position l of a sequence [N, T, D]"),
    ("z_k,l^t", "the same after t decoding steps", "what decode(..., watch=) sees after sweep t"),
    ("J_f", "Jacobian of f", "its log-determinant: Decoded.log_det, Encoded.log_det"),
    ("T", "decoding steps of Jacobi decoding", "BlockStats.sweeps"),
    ("L", "sub-variables", "Block.length"),
    ("K", "steps of the flow", "len(Flow.blocks)"),
    ("tau", "stopping threshold", "Method.tol"),
)

# Table A3: mean iterations, tau 0.5; the first layer is decoded sequentially.
SWEEPS: dict[str, tuple[float, ...]] = {
    "CIFAR-10": (255, 53.9, 4.9, 4.0, 3.0, 6.1),
    "CIFAR-100": (255, 7.5, 4.7, 4.0, 4.0, 5.2),
    "AFHQ": (1023, 6.6, 6.0, 5.2, 5.0, 5.9, 4.5, 4.0),
}

# Table A4: seconds and share, sequential and selective, and the iterations that it prints.
Line = tuple[str, float, float, float, float, str]
RUNTIME: dict[str, tuple[Line, ...]] = {
    "CIFAR-10": (
        ("1", 1.45, 14.8, 1.50, 55.7, "255"),
        ("2", 1.45, 14.8, 0.69, 25.7, "53.9"),
        ("3–6", 5.82, 59.4, 0.23, 8.6, "3.0–6.1"),
        ("other", 1.08, 11.0, 0.27, 10.0, "–"),
        ("total", 9.79, 100, 2.69, 100, "3.6x"),
    ),
    "CIFAR-100": (
        ("1", 1.51, 16.5, 1.55, 76.6, "255"),
        ("2", 1.50, 16.4, 0.10, 4.7, "7.5"),
        ("3–6", 6.00, 65.6, 0.23, 11.4, "4.0–5.2"),
        ("other", 0.15, 1.6, 0.15, 7.2, "–"),
        ("total", 9.15, 100, 2.02, 100, "4.5x"),
    ),
    "AFHQ": (
        ("1", 21.60, 12.5, 21.46, 52.0, "1023"),
        ("2", 20.85, 12.1, 2.56, 6.2, "6.6"),
        ("3–8", 125.10, 72.4, 11.85, 28.7, "4.0–6.0"),
        ("other", 5.35, 3.1, 5.38, 13.1, "–"),
        ("total", 172.90, 100, 41.25, 100, "4.2x"),
    ),
}

MEMORY = {"sequential with its cache": 7.8, "selective": 5.2}  # GB, AFHQ, batch 16 (appendix on memory)
ISING = {"sequential": (16.84, 0.0005, 0.0500), "selective": (1.07, -0.0003, 0.0498)}  # Table A5
ISING_SPEEDUP = 15.7
MAF_MNIST = {"sequential": 281.00, "selective": 15.24}  # seconds for 100 images
MAF_MNIST_SPEEDUP = 18.4
RECONSTRUCTION = {"CIFAR-10": 0.00636, "CIFAR-100": 0.00313, "AFHQ": 0.00122}  # mean squared error
GENERATORS = {
    "FastGAN": (3.41, 9.67),
    "DDIM, 20 steps": (2.31, 19.32),
    "selective": (2.63, 10.20),
}  # Table A6
SHOWN_SPEEDUP = {"CIFAR-10": 3.6, "CIFAR-100": 4.7, "AFHQ": 4.5}  # under Figures 3, A7 and A8


def comparison() -> Table:
    """Table 1."""
    rows = []
    for data, methods in COMPARISON.items():
        for method, (seconds, spread, speedup, *quality) in methods.items():
            spreads = COMPARISON_SPREAD.get(data, {}).get(method)
            shown = [f"{q:.2f}" for q in quality]
            if spreads:
                shown = [f"{q} ± {s:.2f}" for q, s in zip(shown, spreads, strict=True)]
            time = f"{seconds:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")
            rows.append((data, method, time, f"{speedup:.1f}x", *shown))
    return Table(
        title="The paper's Table 1",
        head=("data", "method", "seconds", "speed-up", "FID ↓", "CLIP-IQA ↑", "BRISQUE"),
        rows=rows,
        note="Two L40S GPUs, batch 256. The paper prints an upward arrow over BRISQUE; lower is better.",
    )


def configuration() -> Table:
    """Table A2."""
    rows = [(name, *values) for name, values in CONFIGURATION.items()]
    return Table(title="The paper's Table A2", head=("", *DATA), rows=rows)


def notation() -> Table:
    """Table A1 (tau is of Algorithm 1)."""
    return Table(
        title="The paper's notation (Table A1) in our code", head=("paper", "is", "here"), rows=NOTATION
    )


def sweeps() -> Table:
    """Table A3."""
    rows = []
    for i in range(max(map(len, SWEEPS.values()))):
        cells = [
            (f"{SWEEPS[d][i]:.1f}" if i else f"{SWEEPS[d][i]:g}") if i < len(SWEEPS[d]) else "–" for d in DATA
        ]
        rows.append((f"{i + 1}" + (" (sequential)" if i == 0 else ""), *cells))
    return Table(title="The paper's Table A3", head=("layer", *DATA), rows=rows)


def runtime() -> Table:
    """Table A4."""
    rows = [
        (data, layer, f"{seq:.2f}", f"{share:.1f}%", f"{ours:.2f}", f"{part:.1f}%", iterations)
        for data, lines in RUNTIME.items()
        for layer, seq, share, ours, part, iterations in lines
    ]
    head = ("data", "layer", "sequential s", "share", "selective s", "share", "iterations")
    return Table(title="The paper's Table A4", head=head, rows=rows)


def memory() -> Table:
    """The appendix on memory."""
    rows = [(name, f"{value:.1f} GB") for name, value in MEMORY.items()]
    return Table(
        title="The paper's figures (AFHQ, batch 16)", head=("method", "memory"), rows=rows, note="On a GPU."
    )


def ising() -> Table:
    """Table A5."""
    rows = [(name, f"{s:.2f}", f"{e:.4f}", f"{m:.4f}") for name, (s, e, m) in ISING.items()]
    return Table(
        title="The paper's Table A5",
        head=("method", "seconds", "energy per site", "|m|"),
        rows=rows,
        note=f"100,000 samples; {ISING_SPEEDUP}x. An 8-layer MAF, 3000 epochs of reverse KL, whose loss "
        "fell from -1111 to -1129. 0.000 and 0.050 are the values of 256 independent spins, not of the "
        "Ising model at T = 3.",
    )


def maf_mnist() -> Table:
    """The MAF of binary MNIST."""
    rows = [(name, f"{s:.2f}") for name, s in MAF_MNIST.items()]
    return Table(
        title="The paper's figures",
        head=("method", "seconds"),
        rows=rows,
        note=f"100 images, nflows; {MAF_MNIST_SPEEDUP}x.",
    )


def reconstruction() -> Table:
    """Reconstruction errors."""
    rows = [(data, f"{mse:.5f}") for data, mse in RECONSTRUCTION.items()]
    return Table(title="The paper's figures", head=("data", "mean squared error"), rows=rows)


def generators() -> Table:
    """Table A6."""
    rows = [(name, f"{s:.2f}", f"{fid:.2f}") for name, (s, fid) in GENERATORS.items()]
    return Table(title="The paper's Table A6 (CIFAR-10)", head=("method", "seconds", "FID ↓"), rows=rows)
