"""What results print and save: a few lines for people, a picture for notebooks."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow.core.pictures import to_pixels
from subjects import maf, tarflow


@pytest.fixture(scope="module")
def flow() -> jf.Flow:
    return tarflow(0.25, num_classes=3, blocks=3).float().eval().requires_grad_(False)


def test_a_result_prints_shapes_and_how_it_ended(flow: jf.Flow) -> None:
    out = flow.decode(flow.noise(1000, seed=0), "selective", tol=0.1, check=True)
    lines = repr(out).splitlines()
    assert lines[0] == "Decoded x [1000, 1, 8, 8] float32, log_det [1000]"
    assert out.stats.residual is not None
    residual = f"residual at most {out.stats.residual.max():.2g}"
    assert lines[1:] == [repr(out.stats)]
    assert lines[1].startswith("Stats of 1000 samples: 1000 converged, ")
    assert lines[1].endswith(f" s, backend {out.stats.backend}, {residual}")
    ended = ("sweeps on average", "1000 converged")
    assert all(words in repr(out.stats.blocks[1]) for words in ended)


@pytest.mark.filterwarnings("ignore:tol 4 is loose")
def test_converged_is_not_said_of_wrong_images_alone() -> None:
    """A named plan keeps its tol: what is printed says whether the residual was looked at, and whether it is large."""
    hard = tarflow(0.3, num_classes=3, blocks=3).float().eval().requires_grad_(False)
    z = hard.noise(4, seed=0)
    exact = hard.decode(z, "sequential")
    assert "residual" not in repr(exact)
    unknown = hard.decode(z, "uniform", tol=4.0)
    assert repr(unknown).endswith(", residual not measured")
    assert unknown.stats.summary().endswith("does not bound the error; check=True measures the residual")
    known = hard.decode(z, "uniform", tol=4.0, check=True)
    assert (known.x - exact.x).abs().max() > 0.5
    assert known.stats.loose
    assert known.stats.residual is not None
    assert repr(known).endswith(f"residual at most {known.stats.residual.max():.2g}, far from exact")
    assert known.stats.summary().endswith("\n  far from exact: lower tol, or use plan auto")
    tight = hard.decode(z, "uniform", tol=1e-4, check=True).stats
    assert not tight.loose
    assert tight.summary().endswith(f"\n  converged: {jf.Status.CONVERGED.value}")


def test_what_encoding_returns_prints_shapes(flow: jf.Flow) -> None:
    assert repr(flow.encode(torch.zeros(2, 1, 8, 8))) == "Encoded z [2, 16, 4] float32, log_det [2]"


def test_the_summary_has_a_line_per_block(flow: jf.Flow) -> None:
    stats = flow.decode(flow.noise(4, seed=0), "selective", tol=0.1).stats
    first, head, *rows, last = stats.summary().splitlines()
    assert first == repr(stats)
    assert head.split() == ["block", "sweeps", "seconds", "method", "ended"]
    assert [row.split()[:2] for row in rows] == [
        [str(i), f"{b.sweeps.double().mean():.1f}"] for i, b in enumerate(stats.blocks)
    ]
    assert [re.split(" {2,}", row)[-2:] for row in rows] == [
        [re.split(" {2,}", rows[0])[-2], "4 exact"],
        *[["sweeps, tol 0.1, init previous", "4 converged"]] * 2,
    ]
    assert last == f"  converged: {jf.Status.CONVERGED.value}"
    assert max(map(len, [head, *rows])) <= 80


def test_results_without_samples_print(flow: jf.Flow) -> None:
    out = flow.sample(0, seed=0)
    assert "Stats of 0 samples: none" in repr(out)
    assert "exact: " in out.stats.summary()
    assert out._repr_png_() is None


def test_a_plan_prints_runs_of_equal_blocks_once() -> None:
    window = jf.Method(width=16, tol=1e-3, max_sweeps=9)
    plan = jf.Plan((jf.Method(width=1), *[jf.Method(tol=0.5, init="zeros")] * 10, window))
    assert repr(plan).splitlines() == [
        "Plan of 12 blocks, the one next to the noise first",
        "  block 0: sequential",
        "  blocks 1-10: sweeps, tol 0.5, init zeros",
        "  block 11: window of 16, tol 0.001, max_sweeps 9",
    ]


def test_images_are_saved_and_shown(flow: jf.Flow, tmp_path: Path) -> None:
    out = flow.sample(5, seed=0, plan="sequential")
    out.save(tmp_path / "grid.png", columns=5)
    with Image.open(tmp_path / "grid.png") as picture:
        sheet = np.asarray(picture)[::2, ::2]
    for i, pixels in enumerate(to_pixels(out.x)):
        assert np.array_equal(sheet[1:9, 1 + 9 * i : 9 + 9 * i], pixels[..., 0])
    jf.save_images(out.x, tmp_path / "same.png", columns=5)
    assert (tmp_path / "same.png").read_bytes() == (tmp_path / "grid.png").read_bytes()
    shown = out._repr_png_()
    assert shown is not None
    with Image.open(io.BytesIO(shown)) as picture:
        assert picture.size == (2 * (3 * 9 + 1), 2 * (2 * 9 + 1))


def test_vectors_are_not_saved_as_a_picture(tmp_path: Path) -> None:
    out = maf(0.5, features=5, blocks=1, hidden=(8,)).sample(2, seed=0)
    assert out._repr_png_() is None
    with pytest.raises(ValueError, match=r"samples of shape \[2, 5\] are no images .* save the numbers"):
        out.save(tmp_path / "grid.png")
    with pytest.raises(ValueError, match=r"x\[None\] for one image"):
        jf.save_images(torch.zeros(1, 4, 4), tmp_path / "grid.png")
    square = torch.zeros(2, 16)
    jf.save_images(square, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").exists()
