"""Checkpoints: a folder with config.json, model.safetensors and README.md (the model card).

Nothing is unpickled and no code is loaded. Config and tensors are compared before any weight is allocated.

Two files cannot be replaced in one step. So a save that changes the config writes three times: the new config
with the old one under "previous", then the weights, then the new config alone. The header of the weights
identifies their config (`_config_id`). An interrupted save leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jacobiflow.core.files import check_plain, checksum, read_text, write_atomically, write_text
from jacobiflow.core.records import RecordError, build, parse_json
from jacobiflow.core.results import JacobiflowError
from jacobiflow.core.suggest import did_you_mean
from jacobiflow.flows import calibration, profile
from jacobiflow.flows.calibration import Calibration
from jacobiflow.flows.families import find_family, loads_as_itself, upgrade
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.profile import Profile

MODELS = "jacobiflow_models"  # the distribution of bundled checkpoints: one folder per model
HUB_ID = re.compile(r"[^./~\\][^/\\]*/[^/\\]+")  # user/model
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FILES = [CONFIG, WEIGHTS, CARD, calibration.FILE, profile.FILE]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CheckpointError(JacobiflowError, ValueError):
    """A checkpoint that is missing, is damaged, or does not fit its config."""


# Writing


def save(flow: Flow, folder: str | Path, *, dtype: torch.dtype | None = None, card: str | None = None) -> None:
    """Write `flow` into `folder`. A save that fails leaves the previous checkpoint.

    dtype: of the stored weights. Default: the dtype of the flow.
    card: the text of README.md. Default: a generated card, unless the folder has one for this config.
    """
    folder, kind = Path(folder), type(flow)
    if not loads_as_itself(kind):
        fix = "give it a name in `family` and register it"
        raise CheckpointError(f"{kind.__name__} would load as another family's flow: {fix}")
    plain = {"format": "jacobiflow", "version": 1, "family": flow.family, "config": asdict(flow.config)}
    text = json.dumps(plain, indent=2) + "\n"
    doc = json.loads(text)  # with lists for tuples, as a reader sees them
    tensors = {name: _stored(name, value, dtype) for name, value in flow.state_dict().items()}
    header = {"jacobiflow": f"{_config_id(doc)} {checksum(tensors)}"}  # one entry: the order of several is random
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = _saved_config(folder)
        same = old is not None and _config_id(old) == _config_id(doc)
        if old is not None and not same:
            write_text(folder / CONFIG, json.dumps(doc | {"previous": old}, indent=2) + "\n")
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata=header))
        write_text(folder / CONFIG, text)
        if card is not None or not same or not (folder / CARD).exists():
            write_text(folder / CARD, default_card(flow) if card is None else card)
        exactly = dtype in (None, next(flow.parameters()).dtype)
        for file, measured in ((calibration.FILE, flow.calibration), (profile.FILE, flow.profile)):
            if exactly and measured is not None and measured.weights == flow.fingerprint():
                measured.save(folder)
            else:  # it was measured on other weights than those that are stored
                (folder / file).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from None


def _stored(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor as it is written; CheckpointError if `dtype` cannot hold its numbers."""
    dtype = dtype or value.dtype
    if dtype not in DTYPES.values():
        raise CheckpointError(f"weights are stored as float64, float32, float16 or bfloat16, not {dtype}")
    stored = value.detach().to("cpu", dtype).contiguous()
    if dtype != value.dtype and bool((stored.isinf() & value.detach().cpu().isfinite()).any()):
        raise CheckpointError(f"tensor {name!r} has values too large for {dtype}: use a wider type")
    return stored


def _config_id(doc: Mapping[str, Any]) -> str:
    """Identifies a config in the header of its weights."""
    plain = json.dumps([doc.get("family"), doc.get("config")], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _saved_config(folder: Path) -> dict[str, Any] | None:
    """The config of the checkpoint in `folder`; None if there is none that can be read."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            return _matching_config(_read_config(folder / CONFIG), weights)[0]
    except (OSError, SafetensorError, ValueError):
        return None


def default_card(flow: Flow, source: str = "this folder") -> str:
    """A model card with the size and the config of the flow."""
    rows = "\n".join(f"| {k} | {short(v)} |" for k, v in asdict(flow.config).items())
    count = sum(p.numel() for p in flow.parameters())
    return (
        "---\nlibrary_name: jacobiflow\ntags: [normalizing-flow]\n---\n"
        f"# A {flow.family} flow\n\n{count:,} parameters. "
        f'Load it with `jacobiflow.load("{source}")`.\n\n'
        f"| setting | value |\n|---|---|\n{rows}\n"
    )


# Reading


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Flow:
    """A flow from a bundled name, a checkpoint folder, the folder of a training, or a hub id ("user/model").

    revision: commit, tag or branch of a hub id. Default: the newest commit. `flow.revision` is the commit
    that was loaded.
    """
    if not isinstance(source, str | Path):
        raise CheckpointError(f"a model is a name, a folder or a hub id, not {short(source)}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype must be a type of floats such as torch.float32, not {short(dtype)}")
    folder, commit = _find(source, revision)
    try:
        place = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError):  # depends on the kind of device
        raise CheckpointError(f"this torch sees no device {short(device)}") from None
    flow = _read(folder, dtype).to(device=place)
    flow.eval()
    flow.revision = commit
    flow.calibration = Calibration.load(folder, (len(flow.blocks), *flow.sequence_shape))
    flow.profile = Profile.load(folder)
    return flow


def _find(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """The folder of a checkpoint, and its commit if it is a hub id."""
    path, name = Path(source), str(source)
    try:
        there = path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot read {short(name)}: {error.strerror}") from None
    if name in bundled_names():
        path = Path(str(files(MODELS) / name))
    elif (path / "model" / CONFIG).is_file() and not (path / CONFIG).exists():
        path = path / "model"  # of a training
    elif there and not path.is_dir():
        raise CheckpointError(f"{name} is a file; a checkpoint is a folder with {CONFIG} and {WEIGHTS}")
    elif not there and isinstance(source, str) and HUB_ID.fullmatch(source):
        return _download(source, revision)
    elif not there:
        known = ", ".join(bundled_names()) or "none installed: pip install jacobiflow-models"
        what = f"no model {name!r}{did_you_mean(name, bundled_names())}"
        raise CheckpointError(f"{what}: give a bundled name ({known}), a checkpoint folder or a hub id")
    if revision is not None:
        raise CheckpointError(f"revision belongs to hub ids; {name!r} is on this machine")
    return path, None


def bundled_names() -> list[str]:
    """The models of the distribution jacobiflow-models; none if it is not installed."""
    try:
        folder = files(MODELS)
    except ModuleNotFoundError:
        return []
    return sorted(f.name for f in folder.iterdir() if f.is_dir() and (f / CONFIG).is_file())


def _read(folder: Path, dtype: torch.dtype) -> Flow:
    path, doc = folder / WEIGHTS, _read_config(folder / CONFIG)
    with _errors(path):
        check_plain(path)
        with safe_open(path, framework="pt") as f:
            doc, total = _matching_config(doc, f)
            family, config = _parse_config(doc, folder / CONFIG)
            _check_tensors(f, config, path)
            tensors = {name: f.get_tensor(name) for name, _ in config.shapes()}
    if total and total != checksum(tensors):
        raise CheckpointError(f"{path} is damaged: its numbers are not those that were saved")
    try:
        with torch.random.fork_rng(devices=[]):  # the initial weights are replaced
            flow: Flow = family(config).to(dtype)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    flow.load_state_dict(tensors)
    return flow


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """A file that is missing or cannot be read as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        if path.name == CONFIG and (path.parent / "state.safetensors").exists():
            advice = "rerun its command to finish it, or use a checkpoint in its folder kept"
            raise CheckpointError(f"{path.parent} is a training that has not finished: {advice}") from None
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a checkpoint") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    """The content of config.json, if it is in our format."""
    with _errors(path):
        doc = parse_json(read_text(path))
    if not isinstance(doc, dict) or doc.get("format") != "jacobiflow":
        raise CheckpointError(f'{path} is not a jacobiflow config ("format": "jacobiflow" is missing)')
    if doc.get("version") != 1:
        raise CheckpointError(f"{path}: this release reads version 1, not {short(doc.get('version'))}")
    return doc


def _matching_config(doc: dict[str, Any], weights: Any) -> tuple[dict[str, Any], str]:
    """The config of these open weights: `doc` or its "previous"; and their checksum, "" if unknown."""
    config_id, _, total = (weights.metadata() or {}).get("jacobiflow", "").partition(" ")
    previous = doc.pop("previous", None)
    if isinstance(previous, dict) and config_id != _config_id(doc):
        return previous, total  # a save was interrupted before it replaced the weights
    return doc, total


def _parse_config(doc: Mapping[str, Any], path: Path) -> tuple[type[Any], Any]:
    """The family and config of a checkpoint."""
    try:
        doc = upgrade(doc)
        family = find_family(doc.get("family"))
        return family, build(family.config_type, doc.get("config"), "config")
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_tensors(f: Any, config: Any, path: Path) -> None:
    """CheckpointError unless the tensors in an open file have the names, shapes and types of `config`."""
    left = set(f.keys())
    for name, shape in config.shapes():
        if name not in left:
            raise CheckpointError(f"{path}: tensor {name!r} is missing")
        left.remove(name)
        piece = f.get_slice(name)
        if tuple(piece.get_shape()) != shape:
            want = ", ".join(map(short, shape))
            raise CheckpointError(f"{path}: tensor {name!r} is {list(piece.get_shape())}, its config says [{want}]")
        if piece.get_dtype() not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has type {piece.get_dtype()}, not a float")
    if left:
        raise CheckpointError(f"{path}: tensor {short(min(left))} is not part of this model")


# The hub


HUB_ERRORS = {
    "GatedRepoError": "its owner must grant access first; ask on its page, then `hf auth login`",
    "RepositoryNotFoundError": "no such model, or it is private (then `hf auth login`)",
    "RevisionNotFoundError": "it has no such revision",
    "IncompleteSnapshotError": "the local cache has only a part of it and there is no connection",
    "LocalEntryNotFoundError": "no connection to the hub, and it is not in the local cache",
}


@contextmanager
def _hub(failed: str) -> Iterator[Any]:
    """The client of the hub. Its errors become one line that begins with `failed`."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise CheckpointError("hub ids need huggingface_hub: pip install 'jacobiflow[hub]'") from None
    try:
        yield hub
    except Exception as error:  # the client raises many kinds
        reasons = (text for name, text in HUB_ERRORS.items() if isinstance(error, getattr(hub.errors, name, ())))
        lines = (line.strip() for line in str(error).splitlines() if line.strip())
        reason = next(chain(reasons, lines), type(error).__name__)
        raise CheckpointError(f"{failed}: {reason}") from None


def _download(repo: str, revision: str | None) -> tuple[Path, str]:
    """The folder of a checkpoint from the hub or its local cache, and its commit."""
    with _hub(f"there is no folder {repo!r}, and the hub does not give it") as hub:
        folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=FILES))
    cache = folder.resolve().parents[2:3]  # <cache>/models--user--model/snapshots/<commit>
    for name in (CONFIG, WEIGHTS):
        if cache and not (folder / name).resolve().is_relative_to(cache[0]):
            raise CheckpointError(f"{repo}: {name} is a link that leaves the hub's cache")
    return folder, folder.name


def push_to_hub(
    flow: Flow,
    repo: str,
    *,
    private: bool = False,
    message: str = "Upload a flow",
    dtype: torch.dtype | None = None,
    card: str | None = None,
) -> str:
    """Upload `flow` as a checkpoint to `repo` ("user/model"). Returns the address of the new commit.

    dtype, card: as in `save`.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(flow, folder, dtype=dtype, card=card or default_card(flow, repo))
        with _hub(f"cannot upload to {repo!r}") as hub:
            hub.create_repo(repo, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message))
