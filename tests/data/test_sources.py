"""Sources of images: what is read is exact, what cannot be read is named in one line."""

from __future__ import annotations

import importlib
import io
import os
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jacobiflow.core.results import JacobiflowError
from jacobiflow.data import decoding
from jacobiflow.data.decoding import DataError, Images
from jacobiflow.data.sources import DataConfig, load_images

MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist.npz"


def load(source: Path | str, **options: Any) -> tuple[Images, Images]:
    """load_images, with the fields of DataConfig and its own options side by side."""
    shape = {k: options.pop(k) for k in ("image_size", "channels", "num_classes") if k in options}
    return load_images(DataConfig(source=str(source), **options), **shape)


def refusal(source: Path | str, **options: Any) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(DataError) as caught:
        load(source, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no traceback of a library
    return line


def picture(value: int = 0, size: tuple[int, int] = (4, 4), mode: str = "L") -> Image.Image:
    return Image.new(mode, size, value if mode == "L" else (value,) * 3)


def save(image: Image.Image, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def one(image: Image.Image, path: Path, **options: Any) -> torch.Tensor:
    """The pixels [C, H, W] of the only image of a folder."""
    saving = options.pop("saving", {})
    save(image, path, **saving)
    (pixels,) = load(path.parent, **options)[0].pixels
    return pixels


def values(images: Images) -> list[int]:
    """The first pixel of every image: tests paint an image in one number to know it again."""
    return images.pixels[:, 0, 0, 0].tolist()


# ---- npz files


@pytest.fixture
def stacks() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": draw.integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
        "y_test": np.array([2, 1, 0], dtype=np.uint8),
    }


def test_npz_with_its_own_split_is_taken_as_it_is(tmp_path, stacks):
    np.savez(tmp_path / "a.npz", **stacks)
    train, validation = load(tmp_path / "a.npz", num_classes=3)
    assert train.pixels.dtype == torch.uint8
    assert train.pixels.is_contiguous()
    assert torch.equal(train.pixels, torch.from_numpy(stacks["x_train"]).permute(0, 3, 1, 2))
    assert torch.equal(validation.pixels, torch.from_numpy(stacks["x_test"]).permute(0, 3, 1, 2))
    assert train.labels.dtype == validation.labels.dtype == torch.int64
    assert (train.labels.tolist(), validation.labels.tolist()) == ([0, 1, 2, 0, 1, 2], [2, 1, 0])
    assert load(tmp_path / "a.npz")[0].labels is None


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels"), ("anything", None)])
@pytest.mark.parametrize("layout", ["NHW", "NHWC", "NCHW"])
def test_npz_names_and_layouts(tmp_path, names, layout):
    x = np.arange(3 * 6 * 5, dtype=np.uint8).reshape(3, 6, 5)
    stored = {"NHW": x, "NHWC": np.stack([x, x + 1, x + 2], -1), "NCHW": np.stack([x, x + 1, x + 2], 1)}[layout]
    arrays = {names[0]: stored} | ({names[1]: np.array([[0], [1], [2]])} if names[1] else {})
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    train, validation = load(tmp_path / "a.npz", validation=0, num_classes=3 if names[1] else 0)
    assert train.pixels.shape == (3, 1 if layout == "NHW" else 3, 6, 5)
    for channel in range(train.pixels.shape[1]):
        assert torch.equal(train.pixels[:, channel], torch.from_numpy(x + channel))
    assert names[1] is None or train.labels.tolist() == [0, 1, 2]
    assert validation.pixels.shape == (0, *train.pixels.shape[1:])


def test_npz_is_resized_and_recoloured(tmp_path, stacks):
    np.savez(tmp_path / "a.npz", **stacks)
    train, validation = load(tmp_path / "a.npz", image_size=4, channels=1)
    r, g, b = np.moveaxis(stacks["x_train"][:, :, :4].astype(float), -1, 0)  # 5 wide: the centre begins at 0
    assert train.pixels.shape == (6, 1, 4, 4)
    assert validation.pixels.shape == (3, 1, 4, 4)
    assert np.abs(train.pixels[:, 0].numpy() - (0.299 * r + 0.587 * g + 0.114 * b)).max() <= 0.51
    doubled, _ = load(tmp_path / "a.npz", image_size=8, fit="stretch")
    wanted = Image.fromarray(stacks["x_train"][1]).resize((8, 8), Image.Resampling.LANCZOS)
    assert np.array_equal(doubled.pixels[1].permute(1, 2, 0).numpy(), np.asarray(wanted))


def test_npz_alpha_lies_over_white(tmp_path):
    x = np.zeros((2, 1, 3, 4), dtype=np.uint8)
    x[..., 3] = [0, 255, 128]
    np.savez(tmp_path / "a.npz", x=x)
    train, _ = load(tmp_path / "a.npz", validation=0)
    assert train.pixels[0, :, 0].tolist() == [[255, 0, 127]] * 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint16, bool])
def test_npz_other_dtypes_are_refused(tmp_path, dtype):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 4, 4), dtype=dtype))
    assert f"x holds {np.dtype(dtype)} values: store uint8" in refusal(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": np.zeros((2, 4, 4), np.uint8), "b": np.zeros(2)}, "holds a, b: name the images x_train or x"),
        ({"x": np.zeros((2, 16), np.uint8)}, r"x has shape (2, 16): give [N, H, W]"),
        ({"x": np.zeros((2, 5, 5, 2), np.uint8)}, "x has shape (2, 5, 5, 2)"),
        ({"x": np.zeros((2, 0, 4), np.uint8)}, "x has shape (2, 0, 4): give [N, H, W]"),
        ({"x": np.zeros((0, 4, 4), np.uint8)}, "x holds no images"),
        ({"x": np.zeros((2, 4, 4), np.uint8)}, "x has no labels but the model has classes: add an array y"),
        ({"x": np.zeros((2, 4, 4), np.uint8), "y": np.zeros(3, int)}, "y has shape (3,) for 2 images"),
        ({"x": np.zeros((2, 4, 4), np.uint8), "y": np.zeros(2)}, "y holds float64 values"),
        ({"x": np.zeros((2, 4, 4), np.uint8), "y": np.array([0, 7])}, "label 7 of image 1 is outside 0 to 2"),
        (
            {"x": np.zeros((2, 4, 4), np.uint8), "y": np.array([-1, 0])},
            "label -1 of image 0 is outside 0 to 2",
        ),
        (
            {"x": np.zeros((1, 4, 4), np.uint8), "y": np.array([2**64 - 1], np.uint64)},
            "label 18446744073709551615 of image 0",
        ),
        (
            {
                "x_train": np.zeros((2, 4, 4), np.uint8),
                "y_train": np.zeros(2, int),
                "x_test": np.zeros((2, 4, 4), np.uint8),
            },
            "x_test has no labels but the model has classes: add an array y_test",
        ),
    ],
)
def test_npz_that_cannot_be_used(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    assert words in refusal(tmp_path / "a.npz", num_classes=3)


def test_npz_validation_of_another_size(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((2, 4, 4), np.uint8), x_test=np.zeros((2, 6, 5), np.uint8))
    assert "training images are 4 x 4 pixels and image 0 is 5 x 6" in refusal(tmp_path / "a.npz")
    assert load(tmp_path / "a.npz", image_size=4)[1].pixels.shape == (2, 1, 4, 4)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_npz_is_never_unpickled(tmp_path):
    sign = tmp_path / "unpickled"
    np.savez(tmp_path / "a.npz", x=np.array([Bomb(sign)], dtype=object))
    assert "x holds object values" in refusal(tmp_path / "a.npz")
    assert not sign.exists()


def write_npz(
    path: Path,
    shape: tuple[int, ...],
    data: bytes,
    version: bytes = b"\x01\x00",
    kind: int = zipfile.ZIP_DEFLATED,
) -> Path:
    """An .npz file with an array x whose header claims `shape`."""
    header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("x.npy", b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data)
    return path


def test_npz_claims_are_checked_before_memory_is_taken(tmp_path, monkeypatch):
    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("read before it was checked")

    whole = write_npz(tmp_path / "whole.npz", (2, 2, 2), bytes(8))
    assert len(load(whole, validation=0)[0]) == 2  # so the refusals below are about the claims
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", forbidden)
    huge = write_npz(tmp_path / "huge.npz", (100_000, 1000, 1000), bytes(100))
    assert "x claims a shape of (100000, 1000, 1000) but its data differs" in refusal(huge)
    assert "claims a shape of (-1, -100" in refusal(write_npz(tmp_path / "minus.npz", (-1, -100), bytes(100)))
    assert "x is in npy format 2.0" in refusal(write_npz(tmp_path / "new.npz", (2, 2, 2), bytes(8), b"\x02\x00"))
    monkeypatch.setattr(decoding, "MAX_BYTES", 1_000_000)
    true = write_npz(tmp_path / "true.npz", (1000, 40, 40), bytes(1_600_000))  # a zip bomb: small, and honest
    assert true.stat().st_size < 10_000
    assert "true.npz: x would take 0.0 GB of memory" in refusal(true)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_is_not_inflated_before_it_is_checked(tmp_path, monkeypatch, kind):
    """zipfile inflates these kinds as a whole: a kilobyte could take gigabytes."""
    path = write_npz(tmp_path / "a.npz", (1000, 100, 100), bytes(10**7), kind=kind)
    assert path.stat().st_size < 5000
    tracemalloc.start()
    try:
        assert "x is compressed in a way that numpy does not use: write the file again" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "flipped"])
def test_damaged_npz(tmp_path, damage):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).integers(0, 255, (9, 8, 8), dtype=np.uint8))
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(b ^ 255 for b in whole[middle : middle + 40]) + whole[middle + 40 :]
    path.write_bytes({"text": b"hello", "empty": b"", "cut": whole[:middle], "flipped": flipped}[damage])
    line = refusal(path)
    assert str(path) in line
    assert "write the file again" in line


# ---- which images train and which validate


def numbered(path: Path, count: int = 40) -> Path:
    """Image i is painted in i and has the label i."""
    x = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None], (count, 2, 2))
    np.savez(path, x=x, y=np.arange(count))
    return path


def test_held_out_images_are_a_seeded_share(tmp_path):
    source = numbered(tmp_path / "a.npz")
    train, validation = load(source, validation=0.25, num_classes=40)
    assert len(validation) == 10
    assert sorted(values(train) + values(validation)) == list(range(40))
    assert values(train) == sorted(values(train))
    assert values(validation) != sorted(values(validation))
    assert (train.labels.tolist(), validation.labels.tolist()) == (values(train), values(validation))
    assert values(load(source, validation=0.25)[1]) == values(validation)
    assert values(load(source, validation=0.25, split_seed=1)[1]) != values(validation)
    assert len(load(source)[1]) == 2  # 5 %
    assert len(load(source, validation=0.001)[1]) == 1
    assert len(load(source, validation=0)[1]) == 0
    assert [len(part) for part in load(numbered(tmp_path / "single.npz", 1), validation=0.9)] == [1, 0]
    assert [len(part) for part in load(numbered(tmp_path / "pair.npz", 2), validation=0.9)] == [1, 1]


def test_limit_is_about_training_images(tmp_path):
    source = numbered(tmp_path / "a.npz")
    train, validation = load(source, validation=0.25, limit=12, num_classes=40)
    assert len(train) == 12
    assert train.labels.tolist() == values(train) == sorted(values(train))
    assert max(values(train)) > 20  # of all images, not the first: those may be of one class
    assert set(values(load(source, validation=0.25, limit=5)[0])) < set(values(train))
    assert values(validation) == values(load(source, validation=0.25)[1])
    assert len(load(source, validation=0.25, limit=1000)[0]) == 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("validation", 1.0),
        ("validation", -0.1),
        ("validation", float("nan")),
        ("limit", -1),
        ("split_seed", -1),
    ],
)
def test_config_is_checked(field, value):
    with pytest.raises(DataError, match=rf"data\.{field} must be .*, not {value}"):
        DataConfig(**{field: value})


def test_fit_and_shape_are_checked(tmp_path):
    with pytest.raises(DataError, match=r"data\.fit must be crop or stretch or pad, not 'zoom'"):
        DataConfig(fit="zoom")  # type: ignore[arg-type]
    source = numbered(tmp_path / "a.npz")
    assert "not 2" in refusal(source, channels=2)
    assert "not 0" in refusal(source, image_size=0)


# ---- folders


def test_flat_folder_in_order_of_names(tmp_path):
    for name, value in {"b.png": 2, "a.bmp": 1, "C.PNG": 0, "d.webp": 3}.items():
        save(picture(value), tmp_path / name, **({"lossless": True} if name == "d.webp" else {}))
    save(picture(9), tmp_path / ".hidden.png")
    save(picture(9), tmp_path / ".cache" / "x.png")
    (tmp_path / "notes.txt").write_text("not an image")
    train, _ = load(tmp_path, validation=0, channels=1)
    assert values(train) == [0, 1, 2, 3]
    assert "has no labels" in refusal(tmp_path, num_classes=2)


def test_class_folders_are_sorted_and_searched_to_the_bottom(tmp_path):
    save(picture(1), tmp_path / "dog" / "a.png")
    save(picture(2), tmp_path / "cat" / "z.png")
    save(picture(3), tmp_path / "cat" / "deep" / "deeper" / "a.png")
    save(picture(4), tmp_path / "eel" / "deep" / "a.png")
    (tmp_path / "bat").mkdir()  # without images: not a class
    train, _ = load(tmp_path, validation=0, num_classes=3)
    assert dict(zip(values(train), train.labels.tolist(), strict=True)) == {3: 0, 2: 0, 1: 1, 4: 2}
    line = refusal(tmp_path, num_classes=2)
    assert "label 2 (eel) of image 3 is outside 0 to 1: set num_classes to 3" in line
    loose = save(picture(9), tmp_path / "loose.png")
    assert f"{loose} belongs to no class" in refusal(tmp_path, num_classes=3)
    assert sorted(values(load(tmp_path, validation=0)[0])) == [1, 2, 3, 4, 9]


def test_links_are_followed_once(tmp_path):
    save(picture(1), tmp_path / "elsewhere" / "a.png")
    root = tmp_path / "root"
    root.mkdir()
    (root / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(root)
    assert values(load(root, validation=0)[0]) == [1]


@pytest.mark.parametrize("held", ["val", "valid", "validation", "test"])
def test_train_and_validation_folders(tmp_path, held):
    for name, value in (("a", 1), ("b", 2), ("c", 3)):
        save(picture(value), tmp_path / "train" / name / "x.png")
    save(picture(13), tmp_path / held / "c" / "x.png")  # the classes are numbered as in train
    train, validation = load(tmp_path, num_classes=3)
    assert (values(train), train.labels.tolist()) == ([1, 2, 3], [0, 1, 2])
    assert (values(validation), validation.labels.tolist()) == ([13], [2])
    save(picture(14), tmp_path / held / "d" / "x.png")
    assert f"{tmp_path / held / 'd'} is a class without training images" in refusal(tmp_path, num_classes=3)


def test_a_train_folder_alone_is_not_a_class(tmp_path):
    for i in range(4):
        save(picture(i), tmp_path / "train" / "ab"[i % 2] / f"{i}.png")
    train, validation = load(tmp_path, num_classes=2, validation=0.25)
    assert sorted(values(train) + values(validation)) == [0, 1, 2, 3]
    assert train.labels.tolist() == [v % 2 for v in values(train)]
    save(picture(9), tmp_path / "plane" / "x.png")  # beside another class it is one: trains are pictured too
    assert load(tmp_path, num_classes=2, validation=0)[0].labels.tolist() == [0, 1, 1, 1, 1]


def test_empty_and_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    assert f"{tmp_path / 'empty'} holds no images: give a folder with" in refusal(tmp_path / "empty")
    assert "gone.npz does not exist: give an .npz file" in refusal(tmp_path / "gone.npz")
    assert f"{tmp_path / 'gone'} does not exist" in refusal(tmp_path / "gone")
    assert "gone.npz does not exist" in refusal("gone.npz")
    assert f"{tmp_path / 'empty' / 'notes.txt'} is not an .npz file" in refusal(tmp_path / "empty" / "notes.txt")
    assert "data.source is empty: set it to an .npz file" in refusal("")
    assert "does not exist" in refusal("/" + "x" * 5000)
    with pytest.raises(JacobiflowError):
        load(tmp_path / "gone")


def test_a_wrong_end_of_a_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert "photos/cats does not exist" in refusal("photos/cats")


# ---- pictures of every kind


def test_grey_and_colour(tmp_path):
    colour = Image.new("RGB", (2, 1))
    colour.putdata([(255, 0, 0), (10, 200, 30)])
    assert one(colour, tmp_path / "a" / "x.png", channels=1).tolist() == [[[76, 124]]]  # .299 r + .587 g + .114 b
    assert one(colour, tmp_path / "b" / "x.png").tolist() == [[[255, 10]], [[0, 200]], [[0, 30]]]
    assert one(picture(7, (2, 1)), tmp_path / "c" / "x.png").tolist() == [[[7, 7]]]
    assert one(picture(7, (2, 1)), tmp_path / "d" / "x.png", channels=3).tolist() == [[[7, 7]]] * 3


def test_a_folder_with_one_colour_image_is_in_colour(tmp_path):
    for i in range(3):
        save(picture(i), tmp_path / f"{i}.png")
    assert load(tmp_path, validation=0)[0].pixels.shape[1] == 1
    save(Image.new("RGB", (4, 4), (3, 4, 5)), tmp_path / "3.png")
    save(picture(6), tmp_path / "4.png")
    train, _ = load(tmp_path, validation=0)
    assert train.pixels[:, :, 0, 0].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 4, 5], [6, 6, 6]]


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.pgm"])
def test_sixteen_bit_is_scaled(tmp_path, name):
    numbers = np.array([[0, 128, 129, 257, 25700, 65535]], dtype=np.uint16)
    pixels = one(Image.fromarray(numbers), tmp_path / name)
    assert pixels.tolist() == [[[0, 0, 1, 1, 100, 255]]]


def test_transparency_lies_over_white(tmp_path):
    rgba = Image.new("RGBA", (3, 1))
    rgba.putdata([(200, 0, 0, 0), (200, 0, 0, 255), (0, 0, 0, 128)])
    assert one(rgba, tmp_path / "a" / "x.png").tolist() == [
        [[255, 200, 127]],
        [[255, 0, 127]],
        [[255, 0, 127]],
    ]
    grey = Image.new("LA", (2, 1))
    grey.putdata([(9, 0), (9, 255)])
    assert one(grey, tmp_path / "b" / "x.png").tolist() == [[[255, 9]]]
    key = picture(9, (2, 1))
    key.putpixel((0, 0), 5)
    assert one(key, tmp_path / "c" / "x.png", saving={"transparency": 5}).tolist() == [[[255, 9]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    plain = one(palette, tmp_path / "d" / "x.png")
    assert plain.tolist() == [[[10, 40]], [[20, 50]], [[30, 60]]]
    clear = one(palette, tmp_path / "e" / "x.png", saving={"transparency": bytes([0, 255])})
    assert clear.tolist() == [[[255, 40]], [[255, 50]], [[255, 60]]]


def test_other_modes(tmp_path):
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert one(bits, tmp_path / "a" / "x.png").tolist() == [[[0, 255]]]
    cmyk = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert one(cmyk, tmp_path / "b" / "x.tif").flatten().tolist() == [255, 0, 0]
    frames = [Image.new("RGB", (2, 2), c) for c in ("red", "blue")]
    saving = {"save_all": True, "append_images": frames[1:]}
    assert one(frames[0], tmp_path / "c" / "x.gif", saving=saving)[:, 0, 0].tolist() == [255, 0, 0]
    save(Image.fromarray(np.zeros((2, 2), np.float32)), tmp_path / "d" / "x.tif")
    assert "float pixels have no known range" in refusal(tmp_path / "d")
    save(Image.fromarray(np.full((2, 2), 70_000, np.int32)), tmp_path / "e" / "x.tif")
    assert "beyond 16 bit" in refusal(tmp_path / "e")


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("L", (3, 2))
    image.putdata([1, 2, 3, 4, 5, 6])
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    assert one(image, tmp_path / "x.png", saving={"exif": exif}).tolist() == [[[4, 1], [5, 2], [6, 3]]]


# ---- to a square


def ramp(width: int, height: int) -> Image.Image:
    """Column x is painted in 10 x, row y adds y."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray((10 * x + y).astype(np.uint8))


def test_crop_keeps_the_centre(tmp_path):
    wide = one(ramp(8, 4), tmp_path / "a" / "x.png", image_size=4)[0]
    assert wide.tolist() == [[20 + y, 30 + y, 40 + y, 50 + y] for y in range(4)]
    tall = one(ramp(4, 7), tmp_path / "b" / "x.png", image_size=4)[0]
    assert tall[:, 0].tolist() == [1, 2, 3, 4]
    sides = np.zeros((20, 60), np.uint8)
    sides[:, :20], sides[:, 20:40], sides[:, 40:] = 50, 100, 150
    halved = one(Image.fromarray(sides), tmp_path / "c" / "x.png", image_size=10)[0]
    assert (halved[:, 3:7] == 100).all()
    assert (halved[:, 0] < 100).all()  # the filter sees beyond the crop, as if all had been resized before
    assert (halved[:, -1] > 100).all()


def test_stretch_and_pad(tmp_path):
    source = ramp(8, 4)
    wanted = np.asarray(source.resize((4, 4), Image.Resampling.LANCZOS))
    assert np.array_equal(one(source, tmp_path / "a" / "x.png", image_size=4, fit="stretch")[0].numpy(), wanted)
    padded = one(source, tmp_path / "a" / "x.png", image_size=8, fit="pad")[0].numpy()
    assert np.array_equal(padded[2:6], np.asarray(source))
    assert not padded[:2].any()
    assert not padded[6:].any()
    thin = one(picture(9, (1000, 1)), tmp_path / "b" / "x.png", image_size=5, fit="pad", channels=3)
    assert thin[:, :, 0].tolist() == [[0, 0, 9, 0, 0]] * 3


def test_a_size_that_fits_changes_no_pixel(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for fit in ("crop", "stretch", "pad"):
        pixels = one(Image.fromarray(noise), tmp_path / "x.png", image_size=8, fit=fit)
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), noise)


def test_mixed_sizes_need_an_image_size(tmp_path):
    save(picture(1, (4, 6)), tmp_path / "a.png")
    save(picture(2, (5, 5)), tmp_path / "b.png")
    line = refusal(tmp_path, validation=0)
    assert "a.png is 4 x 6 pixels and b.png is 5 x 5: ask for an image size" in line
    assert "training images are" in refusal(tmp_path, validation=0.5)
    assert load(tmp_path, validation=0, image_size=3)[0].pixels.shape == (2, 1, 3, 3)


# ---- files that cannot be read


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_corrupt_files_are_left_out_and_named_once(tmp_path):
    for i in range(20):
        save(picture(i), tmp_path / f"{i:02}.png")
    whole = (tmp_path / "03.png").read_bytes()
    (tmp_path / "03.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "07.png").write_text("this is text")
    (tmp_path / "11.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match="3 of 21 images cannot be read and are left out") as caught:
        train, validation = load(tmp_path, validation=0.5)
    (warning,) = caught
    text = str(warning.message)
    assert "\n" not in text
    assert all(f"{name} (" in text for name in ("03.png", "07.png", "11.jpg"))
    assert sorted(values(train) + values(validation)) == [i for i in range(20) if i not in (3, 7)]


def test_labels_stay_with_their_images_when_some_are_left_out(tmp_path):
    for i in range(10):
        save(picture(i), tmp_path / f"class {i}" / "x.png")
    for i in range(0, 10, 2):
        (tmp_path / f"class {i}" / "x.png").write_text("damaged")
    with pytest.warns(UserWarning, match=r"5 of 10 .*, .*, .* and 2 more"):
        train, _ = load(tmp_path, validation=0, num_classes=10)
    assert values(train) == train.labels.tolist() == [1, 3, 5, 7, 9]


def test_only_corrupt_files_are_an_error(tmp_path):
    (tmp_path / "a.png").write_text("no")
    (tmp_path / "b.png").symlink_to(tmp_path / "gone.png")
    line = refusal(tmp_path, validation=0)
    assert "none of 2 images can be read: a.png (not a readable image), b.png (" in line


@pytest.mark.parametrize("side", [60_000, 11_000])  # beyond Pillow's own limit, and where it only warns
def test_a_picture_that_claims_to_be_huge_is_not_decoded(tmp_path, side, monkeypatch):
    def forbidden(self: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", forbidden)
    (tmp_path / "bomb.png").write_bytes(png_that_claims(side, side))
    line = refusal(tmp_path, image_size=4)
    assert "bomb.png (" in line
    assert "pixels" in line
    assert "decoded" not in line


@pytest.mark.parametrize("name", ["x.webp", "x.avif", "x.jp2"])
def test_slow_formats_have_lower_limits(tmp_path, name, monkeypatch):
    assert one(picture(3), tmp_path / name).shape[1:] == (4, 4)
    monkeypatch.setattr(decoding, "SLOW", dict.fromkeys(decoding.SLOW, 15))
    line = refusal(tmp_path, validation=0)
    assert f"{name} (4 x 4 pixels are" in line
    assert line.endswith(" pixels are too many, 15 is the most)")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices_are_no_pictures(tmp_path, make):
    make(tmp_path / "x.png")
    assert "x.png (it is not a plain file)" in refusal(tmp_path, validation=0)


def test_pillow_does_not_warn_on_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # it warns from here to the double
    assert one(picture(3), tmp_path / "x.png").unique().tolist() == [3]


def test_more_images_than_memory(tmp_path, monkeypatch):
    for i in range(4):
        save(picture(i), tmp_path / f"{i}.png")
    monkeypatch.setattr(decoding, "MAX_BYTES", 60)
    assert "(4 images) would take" in refusal(tmp_path, validation=0)
    assert len(load(tmp_path, validation=0, limit=3)[0]) == 3


def test_formats_that_start_programs_are_not_opened(tmp_path):
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert "not a readable image" in refusal(tmp_path)


def test_more_files_than_are_held_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK", 3)
    for i in range(11):
        save(picture(i), tmp_path / f"{i:02}.png")
    assert values(load(tmp_path, validation=0)[0]) == list(range(11))


# ---- Hugging Face datasets


@pytest.fixture(scope="module")
def hf() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("datasets")


@pytest.fixture
def cache(hf, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows(hf: Any, numbers: list[int], names: tuple[str, str] = ("image", "label")) -> Any:
    """Row i is painted in numbers[i] and has the label numbers[i] % 3."""
    features = hf.Features({names[0]: hf.Image(), names[1]: hf.ClassLabel(names=["ant", "bee", "cat"])})
    columns = {names[0]: [picture(n) for n in numbers], names[1]: [n % 3 for n in numbers]}
    return hf.Dataset.from_dict(columns, features=features)


def test_saved_dataset(hf, tmp_path):
    rows(hf, list(range(10))).save_to_disk(tmp_path / "saved")
    train, validation = load(tmp_path / "saved", validation=0.2, num_classes=3, image_size=2, channels=3)
    assert sorted(values(train) + values(validation)) == list(range(10))
    assert len(validation) == 2
    assert train.pixels.shape == (8, 3, 2, 2)
    assert train.labels.tolist() == [v % 3 for v in values(train)]
    assert "label 2 (cat) of image 2 is outside 0 to 1" in refusal(tmp_path / "saved", num_classes=2)


@pytest.mark.parametrize(("splits", "held"), [(("train", "test"), 1), (("train", "test", "validation"), 2)])
def test_saved_splits(hf, tmp_path, splits, held):
    parts = {name: rows(hf, [10 * i, 10 * i + 1]) for i, name in enumerate(splits)}
    hf.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    train, validation = load(tmp_path / "saved", num_classes=3)
    assert values(train) == [0, 1]
    assert values(validation) == [10 * held, 10 * held + 1]
    assert validation.labels.tolist() == [v % 3 for v in values(validation)]


def test_splits_without_train(hf, tmp_path):
    hf.DatasetDict({"a": rows(hf, [1]), "b": rows(hf, [2])}).save_to_disk(tmp_path / "two")
    assert "no split called train (its splits: a, b)" in refusal(tmp_path / "two")
    hf.DatasetDict({"a": rows(hf, [1])}).save_to_disk(tmp_path / "one")
    assert values(load(tmp_path / "one")[0]) == [1]


def test_columns_are_found_or_named(hf, tmp_path):
    image = hf.Image()
    features = hf.Features(
        {
            "img": image,
            "mask": image,
            "fine": hf.ClassLabel(2),
            "coarse": hf.ClassLabel(2),
            "text": hf.Value("string"),
        }
    )
    columns = {"img": [picture(1)], "mask": [picture(2)], "fine": [0], "coarse": [1], "text": ["cat"]}
    source = tmp_path / "saved"
    hf.Dataset.from_dict(columns, features=features).save_to_disk(source)
    assert values(load(source)[0]) == [1]
    assert values(load(source, image_column="mask")[0]) == [2]
    assert load(source, num_classes=2, label_column="coarse")[0].labels.tolist() == [1]
    assert "set data.label_column to one of fine, coarse" in refusal(source, num_classes=2)
    assert "no image column 'text': set data.image_column to one of img, mask" in refusal(source, image_column="text")
    assert "does not hold class numbers but values like 'cat'" in refusal(source, num_classes=2, label_column="text")
    two = hf.load_from_disk(str(source)).rename_column("img", "photo")
    two.save_to_disk(tmp_path / "two")
    assert "set data.image_column to one of photo, mask" in refusal(tmp_path / "two")
    hf.Dataset.from_dict({"a": [1], "b": ["x"]}).save_to_disk(tmp_path / "none")
    assert "has no column of images, only a, b" in refusal(tmp_path / "none")
    hf.Dataset.from_dict({"image": [picture(1)]}, features=hf.Features({"image": image})).save_to_disk(
        tmp_path / "bare"
    )
    assert "has no column of labels, only image" in refusal(tmp_path / "bare", num_classes=2)


def test_missing_labels_and_damaged_rows(hf, tmp_path):
    png = io.BytesIO()
    picture(5).save(png, "PNG")
    features = hf.Features({"image": hf.Image(), "label": hf.Value("int64")})
    cells = [{"bytes": b, "path": None} for b in (png.getvalue(), b"damaged", png.getvalue())] + [None]
    data = hf.Dataset.from_dict({"image": cells, "label": [0, 1, 2, None]}, features=features)
    data.save_to_disk(tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"2 of 4 .*: dataset row 1 \(.*\), dataset row 3 \("):
        train, _ = load(tmp_path / "saved", validation=0)
    assert values(train) == [5, 5]
    assert "column 'label' has no label in row 3" in refusal(tmp_path / "saved", num_classes=3)


def test_parquet_folder_and_file(hf, cache, tmp_path):
    folder = tmp_path / "repo"
    (folder / "data").mkdir(parents=True)
    rows(hf, [1, 2]).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    rows(hf, [7]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    train, validation = load(folder, num_classes=3)
    assert (values(train), values(validation)) == ([1, 2], [7])
    assert (train.labels.tolist(), validation.labels.tolist()) == ([1, 2], [1])
    single = folder / "data" / "test-00000-of-00001.parquet"
    assert values(load(single)[0]) == [7]
    single.write_bytes(b"damaged")
    assert f"{single} cannot be read as a Hugging Face dataset" in refusal(single)


@pytest.mark.parametrize("wrapped", [False, True])
def test_plain_bytes_of_a_parquet_file(hf, cache, tmp_path, wrapped):
    png = io.BytesIO()
    picture(5).save(png, "PNG")
    cell = {"bytes": png.getvalue(), "path": "x.png"} if wrapped else png.getvalue()
    hf.Dataset.from_dict({"picture": [cell], "label": [1]}).to_parquet(tmp_path / "plain.parquet")
    train, _ = load(tmp_path / "plain.parquet", num_classes=2)
    assert (values(train), train.labels.tolist()) == ([5], [1])


def test_cells_that_point_to_files(hf, tmp_path):
    path = save(picture(6), tmp_path / "x.png")
    data = hf.Dataset.from_dict({"image": [str(path)]}, features=hf.Features({"image": hf.Image()}))
    assert data.cast_column("image", hf.Image(decode=False))[0]["image"]["bytes"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "get_dataset_split_names", lambda path, name: ["train"])
        patch.setattr(hf, "load_dataset", lambda path, name, split: data)
        assert values(load("someone/some-images")[0]) == [6]


@pytest.fixture
def commits(monkeypatch) -> list[Any]:
    """No question reaches the hub; all of them are kept here, and the answer is one commit."""
    asked: list[Any] = []

    def info(self: Any, source: str, *, revision: str | None, timeout: float) -> Any:
        asked.append((source, revision))
        if not commit:
            raise ConnectionError
        return SimpleNamespace(sha=commit[0])

    commit: list[str] = []
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    asked.append(commit)
    return asked


def test_dataset_of_the_hub(hf, commits, monkeypatch):
    asked = []

    def load_dataset(path: str, name: str | None = None, *, split: str) -> Any:
        asked.append((path, name, split))
        return rows(hf, [1, 2] if split == "train" else [3])

    monkeypatch.setattr(hf, "get_dataset_split_names", lambda path, name: ["test", "train", "validation"])
    monkeypatch.setattr(hf, "load_dataset", load_dataset)
    train, validation = load("someone/some-images", subset="small", num_classes=3)
    assert asked == [
        ("someone/some-images", "small", "train"),
        ("someone/some-images", "small", "validation"),
    ]
    assert (values(train), values(validation)) == ([1, 2], [3])


@pytest.mark.parametrize(
    ("revision", "answer", "want"),
    [
        ("", ["c" * 40], "c" * 40),  # the newest, whatever is uploaded meanwhile
        ("main", ["c" * 40], "c" * 40),
        ("a" * 40, ["c" * 40], "a" * 40),  # a commit is one already
        ("v1", [], "v1"),  # no connection: the library may have it in its cache
    ],
)
def test_one_commit_of_the_hub_is_read(hf, commits, monkeypatch, revision, answer, want):
    asked = []
    commits[0][:] = answer

    def names(path: str, name: str | None, **options: Any) -> list[str]:
        asked.append(options)
        return ["train"]

    def load_dataset(path: str, name: str | None, *, split: str, **options: Any) -> Any:
        asked.append(options)
        return rows(hf, [1, 2])

    monkeypatch.setattr(hf, "get_dataset_split_names", names)
    monkeypatch.setattr(hf, "load_dataset", load_dataset)
    load("someone/some-images", revision=revision)
    assert asked == [{"revision": want}] * 2
    assert commits[1:] == ([] if revision == want != "v1" else [("someone/some-images", revision or None)])


def test_a_hub_that_refuses(hf, commits, monkeypatch):
    def refuse(path: str, name: str | None) -> list[str]:
        raise ConnectionError(f"no such thing:\n{path}")

    monkeypatch.setattr(hf, "get_dataset_split_names", refuse)
    line = refusal("someone/nothing")
    assert "someone/nothing is no file, folder or Hugging Face dataset" in line
    assert "(no such thing: someone/nothing)" in line


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install '.[data]' in the checkout" in refusal("someone/some-images")
    assert len(load(numbered(tmp_path / "a.npz"))[0]) == 38  # nothing else needs it


def test_the_library_is_not_imported_for_other_sources(tmp_path):
    source = numbered(tmp_path / "a.npz")
    code = (
        "import sys; from jacobiflow.data.sources import DataConfig, load_images; "
        f"load_images(DataConfig(source={str(source)!r})); sys.exit('datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- real data


@pytest.mark.skipif(not MNIST.exists(), reason="needs mnist.npz")
def test_mnist():
    train, validation = load(MNIST, limit=100, image_size=28, channels=1, num_classes=10)
    assert train.pixels.shape == (100, 1, 28, 28)
    assert validation.pixels.shape == (10_000, 1, 28, 28)
    assert validation.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert 25 < train.pixels.float().mean() < 42  # about 33 on all images
    assert set(train.labels.tolist()) == set(range(10))
