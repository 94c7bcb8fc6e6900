"""Import checkpoints of the public TarFlow code as `TarFlow`."""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from jacobiflow.core.arguments import as_int, as_path, number
from jacobiflow.flows.checkpoint import CheckpointError
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig

HEAD_DIM = 64  # of every public model; the shapes do not show it
SAFE_TORCH = "2.10"  # before it, a crafted file can corrupt memory even with weights_only=True
WRAPPERS = ("model", "state_dict", "ema")
RENAMED = {
    ".net.layers.": ".attn_blocks.",
    ".norm1.": ".attention.norm.",
    ".qkv.": ".attention.qkv.",
    ".proj.": ".attention.proj.",
    ".norm2.": ".mlp.norm.",
    ".up.": ".mlp.main.0.",
    ".down.": ".mlp.main.2.",
}
BUFFERS = ("attn_mask", "var")  # optional; the mask is causal by definition
PREFIXES = re.compile(r"^(?:(?:module|_orig_mod)\.)+")
PUBLIC_NAME = re.compile(
    r"(?:^|_)(?P<patch_size>\d+)_(?P<width>\d+)_(?P<blocks>\d+)_(?P<layers_per_block>\d+)_(?P<sigma>\d+\.\d+)$"
)


def import_tarflow(
    path_or_state_dict: str | Path | Mapping[str, Any], image_channels: int = 3, noise_std: float | None = None
) -> TarFlow:
    """The flow of a public TarFlow checkpoint, on the CPU: same densities, same samples.

    path_or_state_dict: a `.pth` or `.pt` file of torch.save, a `.safetensors` file of the same keys,
        or a state dict. It may be nested under "model", "state_dict" or "ema".
    image_channels: 3 for color, 1 for gray. All other sizes follow from the shapes of the weights.
    noise_std: standard deviation of the training noise. None reads it from a public file name, which ends
        in patch_width_blocks_layers_sigma, and is 0 for any other name.

    float64 weights give a float64 flow, all others a float32 flow. A checkpoint that does not fit raises a
    CheckpointError that names the key.

        flow = import_tarflow("afhq_model_8_768_8_8_0.07.pth")
        flow.config.image_size, flow.config.noise_std  # 256, 0.07
    """
    path = None if isinstance(path_or_state_dict, Mapping) else as_path("path_or_state_dict", path_or_state_dict)
    try:
        state = _state_dict(path_or_state_dict if path is None else _read(path))
        config = _config(state, as_int("image_channels", image_channels, 1))
        stated = _stated_noise("" if path is None else path.stem, config)
        config = replace(config, noise_std=stated if noise_std is None else number("noise_std", noise_std))
        dtype, weights = _weights(state, config)
    except ValueError as error:
        raise CheckpointError(f"{'the state dict' if path is None else path}: {error}") from None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # the initial weights are not used
        flow = TarFlow(config).to(dtype)
    flow.load_state_dict(weights)
    return flow.eval()


def _read(path: Path) -> Any:
    """The content of the file, tensors on the CPU."""
    kind = path.suffix.lower()
    if kind not in (".pth", ".pt", ".safetensors"):
        raise CheckpointError("a checkpoint is a .pth, .pt or .safetensors file")
    if not path.is_file():
        raise CheckpointError("is a folder, not a checkpoint file" if path.is_dir() else "there is no such file")
    if kind != ".safetensors" and TorchVersion(torch.__version__) < SAFE_TORCH:
        advice = f"upgrade to torch {SAFE_TORCH} or newer, or convert the file to safetensors"
        raise CheckpointError(f"torch {torch.__version__} cannot load {kind} files safely; {advice}")
    try:
        return safetensors.torch.load_file(path) if kind == ".safetensors" else _read_torch(path)
    except CheckpointError:
        raise
    except PermissionError:
        raise CheckpointError("may not be read: check its permissions") from None
    except pickle.UnpicklingError:
        raise CheckpointError("holds Python objects beside tensors; save model.state_dict() alone") from None
    except Exception:  # readers raise a dozen types for damaged files
        raise CheckpointError(f"damaged, truncated or not in the format of {kind} files") from None


def _read_torch(path: Path) -> Any:
    """The content of a file of torch.save, after a check of every byte: torch would load damage as weights."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # torch would read it as one of its older formats
            raise zipfile.BadZipFile
        archive = zipfile.ZipFile(file)
        names = Counter(archive.namelist())
        for e in archive.infolist():
            # torch.save does not compress. Of folders and entries without bytes, torch returns uninitialized memory.
            whole = e.compress_type == zipfile.ZIP_STORED and e.compress_size == e.file_size
            names[e.filename] += not whole or bool(e.external_attr & 0x10)
        bad = next((name for name, marks in names.items() if marks > 1), None) or archive.testzip()
        if bad is not None:
            raise CheckpointError(f"damaged: {bad!r} is not as torch.save wrote it; get the file again")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _stated_noise(stem: str, config: TarFlowConfig) -> float:
    """The sigma in a public file name, else 0. The other numbers in the name must match the weights."""
    stated = PUBLIC_NAME.search(stem)
    for name, text in stated.groupdict().items() if stated else ():
        if name != "sigma" and int(text) != getattr(config, name):
            what = f"the file name states {name} {text}, the weights have {getattr(config, name)}"
            raise CheckpointError(f"{what}; rename the file, or check image_channels")
    return float(stated["sigma"]) if stated else 0.0


def _state_dict(content: Any) -> dict[str, Any]:
    """The state dict itself, without wrappers and prefixes."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"holds a {type(content).__name__}, not a state dict")
    nested = [name for name in WRAPPERS if isinstance(content.get(name), Mapping)]
    if len(nested) > 1:
        raise CheckpointError(f"holds state dicts under {' and '.join(nested)}; pass the one to import")
    state: dict[str, Any] = {}
    for key, value in (content[nested[0]] if nested else content).items():
        if not isinstance(key, str):
            raise CheckpointError(f"the keys of a state dict are text, not {key!r}")
        short = PREFIXES.sub("", key)
        if short in state:
            raise CheckpointError(f"{short!r} is there twice, with and without a prefix")
        state[short] = value
    return state


def _check_shape(state: Mapping[str, Any], key: str, *want: int | str) -> tuple[int, ...]:
    """The shape of tensor `key`; words in `want` match any length of 1 or more."""
    if key not in state:
        raise CheckpointError(f"{key} is missing")
    value = state[key]
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{key} is a {type(value).__name__}, not a tensor")
    dense = value.layout == torch.strided and not value.is_meta and not value.is_quantized
    if not dense or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise CheckpointError(f"{key} must be a dense tensor that holds its numbers")
    fits = [n > 0 if isinstance(w, str) else n == w for n, w in zip(value.shape, want, strict=False)]
    if value.ndim != len(want) or not all(fits):
        raise CheckpointError(f"{key} has shape {list(value.shape)}, expected [{', '.join(map(str, want))}]")
    return tuple(value.shape)


def _config(state: Mapping[str, Any], image_channels: int) -> TarFlowConfig:
    """The config that the shapes imply. Every key is checked against it afterwards."""
    keys = "\n".join(state)  # counted over all blocks, so that a gap in the numbers is reported as a missing key
    blocks = set(re.findall(r"^blocks\.(\d+)\.", keys, re.MULTILINE))
    layers = set(re.findall(r"^blocks\.\d+\.attn_blocks\.(\d+)\.", keys, re.MULTILINE))
    width, dim = _check_shape(state, "blocks.0.proj_in.weight", "width", "dim")
    if width % HEAD_DIM:
        raise CheckpointError(f"blocks.0.proj_in.weight: width {width} is not a multiple of {HEAD_DIM}")
    patch = math.isqrt(dim // image_channels)
    if image_channels * patch**2 != dim:
        what = f"{dim} numbers per patch are not image_channels {image_channels} times a square"
        raise CheckpointError(f"blocks.0.proj_in.weight: {what}; pass the image_channels of the training data")
    length, _ = _check_shape(state, "blocks.0.pos_embed", "length", width)
    grid = math.isqrt(length)
    if grid**2 != length:
        raise CheckpointError(f"blocks.0.pos_embed: {length} positions are not a square image")
    labelled = re.search(r"^blocks\.\d+\.class_embed$", keys, re.MULTILINE)
    classes = _check_shape(state, "blocks.0.class_embed", "classes", 1, width)[0] if labelled else 0
    rows, _ = _check_shape(state, "blocks.0.proj_out.weight", f"{2 * dim} or {dim}", width)
    return TarFlowConfig(
        image_size=grid * patch,
        image_channels=image_channels,
        patch_size=patch,
        width=width,
        blocks=len(blocks),
        layers_per_block=max(len(layers), 1),
        head_dim=HEAD_DIM,
        num_classes=classes,
        volume_preserving=rows == dim,
    )


def _weights(state: Mapping[str, Any], config: TarFlowConfig) -> tuple[torch.dtype, dict[str, Tensor]]:
    """The dtype of the flow and its state dict. Copies only what it must."""
    names, shapes = dict[str, str](), dict[str, tuple[int, ...]]()  # by public key: our name, and the public shape
    for ours, shape in config.shapes():
        theirs = reduce(lambda name, part: name.replace(*part), RENAMED.items(), ours)
        names[theirs], shapes[theirs] = ours, (shape[0], 1, shape[1]) if ours.endswith("class_embed") else shape
    shapes |= {f"blocks.{k}.attn_mask": (config.length, config.length) for k in range(config.blocks)}
    for key, shape in shapes.items():
        if key in state or not key.endswith(BUFFERS):
            _check_shape(state, key, *shape)
    if unexpected := [key for key in state if key not in shapes]:
        raise CheckpointError(f"unexpected key {unexpected[0]!r}")
    given: dict[str, Tensor] = {key: state[key].detach() for key in names if key in state}
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in given.values()) else torch.float32
    weights = {"var": torch.ones(config.length, config.dim, dtype=dtype)}
    for key, value in given.items():
        if not value.is_floating_point():
            raise CheckpointError(f"{key} is {value.dtype}, not floating point")
        value = value.to("cpu", dtype)
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"{key} has non-finite values")
        if key.endswith("class_embed"):
            value = value[:, 0]
        elif key.endswith("pos_embed") and int(key.split(".")[1]) % 2:
            value = value.flip(0)  # public code: in patch order; here: in the order of the block
        weights[names[key]] = value
    if not bool((weights["var"] > 0).all()):
        raise CheckpointError("var must be positive")
    return dtype, weights
