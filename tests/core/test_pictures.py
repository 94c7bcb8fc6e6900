"""Pictures: every pixel where it belongs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jacobiflow.core.pictures import save_images, save_strip, to_pixels


def test_the_ends_and_the_middle_of_the_range() -> None:
    x = torch.tensor([-1.0, 0.0, 1.0, -7.0, 7.0, 1e30]).view(1, 1, 2, 3)
    assert to_pixels(x).reshape(-1).tolist() == [0, 128, 255, 0, 255, 255]
    levels = torch.arange(256.0).view(1, 1, 16, 16) / 127.5 - 1
    assert to_pixels(levels).reshape(-1).tolist() == list(range(256))
    assert to_pixels(levels.double()).dtype == np.uint8


TILE = """
X......X
.X....X.
..X..X..
...XX...
...XX...
..X..X..
.X....X.
X......X
"""


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_image_that_is_not_finite_is_crossed_out(channels: int, value: float, tmp_path: Path) -> None:
    x = torch.full((3, channels, 8, 8), -1.0)
    x[1, -1, 5, 2] = value  # one number is enough
    save_images(x, tmp_path / "a.png", columns=3, gap=1, zoom=1)
    with Image.open(tmp_path / "a.png") as picture:
        sheet = np.asarray(picture.convert("RGB")).astype(int)
    tiles = [sheet[1:9, left : left + 8] for left in (1, 10, 19)]
    assert (tiles[0] == 0).all()
    assert (tiles[2] == 0).all()
    crossed = tiles[1]
    assert (crossed == crossed[..., :1]).all()  # grey in colour images, too
    dark = np.array([[c == "X" for c in line] for line in TILE.split()])
    assert crossed[dark].max() < 64  # far from the tile and from the ground of the sheet, 128
    assert crossed[~dark].min() > 160


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (4, 4), (3, 4), (28, 28), (64, 32)])
def test_crossed_out_tiles_of_any_size(height: int, width: int) -> None:
    (tile,) = to_pixels(torch.full((1, 1, height, width), math.nan))[..., 0]
    assert set(tile.flat) <= {32, 176}
    assert np.array_equal(tile, tile[::-1])
    assert np.array_equal(tile, tile[:, ::-1])
    assert [tile[0, 0], tile[-1, 0], tile[0, -1], tile[-1, -1]] == [32] * 4
    if min(height, width) > 3:
        assert 0.1 < (tile == 32).mean() < 0.7


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("n", "columns"), [(1, 1), (6, 3), (7, 3), (2, 5)])
@pytest.mark.parametrize(("gap", "zoom"), [(1, 2), (0, 1), (2, 3)])
def test_a_grid_holds_the_images_row_by_row(
    channels: int, n: int, columns: int, gap: int, zoom: int, tmp_path: Path
) -> None:
    x = torch.rand(n, channels, 3, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    before = x.clone()
    save_images(x, tmp_path / "a.png", columns=columns, gap=gap, zoom=zoom)
    assert torch.equal(x, before)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode == ("L" if channels == 1 else "RGB")
        sheet = np.asarray(picture)
    rows = math.ceil(n / columns)
    assert sheet.shape[:2] == (zoom * (rows * (3 + gap) + gap), zoom * (columns * (4 + gap) + gap))
    small = sheet[::zoom, ::zoom].reshape(*sheet[::zoom, ::zoom].shape[:2], channels)
    assert np.array_equal(small.repeat(zoom, 0).repeat(zoom, 1).reshape(sheet.shape), sheet)
    used = np.zeros(small.shape[:2], dtype=bool)
    for i, pixels in enumerate(to_pixels(x)):
        top, left = gap + (i // columns) * (3 + gap), gap + (i % columns) * (4 + gap)
        assert np.array_equal(small[top : top + 3, left : left + 4], pixels)
        used[top : top + 3, left : left + 4] = True
    assert (small[~used] == 128).all()


def test_a_strip_holds_a_row_of_images_per_method(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [(name, torch.rand(4, 1, 14, 14, generator=draw) * 2 - 1) for name in ("one", "two")]
    save_strip(rows, tmp_path / "strip.png", title="a title", shown=3)
    with Image.open(tmp_path / "strip.png") as picture:
        assert picture.mode == "RGB"
        sheet = np.asarray(picture)
    top = 20  # the title
    for _, x in rows:
        for i, pixels in enumerate(to_pixels(x)[:3]):
            left = i * (4 * 14 + 4) + 2
            tile = sheet[top + 2 : top + 2 + 56, left : left + 56]
            assert np.array_equal(tile, pixels.repeat(4, 0).repeat(4, 1).repeat(3, 2))
        below = sheet[top + 62 : top + 62 + 20]
        assert (below < 128).any()  # the caption
        top += 62 + 20
    assert len(sheet) == top


def test_other_formats_than_png_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a name that ends in \.png, not '.*a\.jpg'"):
        save_images(torch.zeros(1, 1, 2, 2), tmp_path / "a.jpg")
    assert not any(tmp_path.iterdir())
