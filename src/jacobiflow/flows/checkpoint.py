"""Checkpoints: a folder with config.json, model.safetensors and README.md (the model card).

Nothing is unpickled and no code is loaded. Config and tensors are compared with each other before
any weight is allocated.

Two files cannot be replaced in one step, so a save that changes the config first writes the new config
with the old one under "previous", then the weights, then the new config alone. The weights' header says
which config they were saved with (`_mark`). Whenever a save is cut short, the folder holds the old
checkpoint or the new one, whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jacobiflow.core.files import checksum, write_atomically
from jacobiflow.core.records import RecordError, build, check_plain, parse_json, read_text
from jacobiflow.core.types import JacobiflowError
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.maf import MAF, MAFConfig
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    TarFlow.family: (TarFlow, TarFlowConfig),
    MAF.family: (MAF, MAFConfig),
}
MODELS = "jacobiflow_models"  # the distribution of bundled checkpoints: one folder per model
HUB_ID = re.compile(r"[^./~\\][^/\\]*/[^/\\]+")  # user/model
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CheckpointError(JacobiflowError, ValueError):
    """A checkpoint that is not there, is damaged, or does not fit its config."""


# Writing


def save(
    flow: Flow, folder: str | Path, *, dtype: torch.dtype | None = None, card: str | None = None
) -> None:
    """Write `flow` into `folder`; a save that fails leaves what was there.

    dtype: how weights are stored (None: as they are).
    card: the text of README.md. None writes one, unless the folder already has a card of this very model.
    """
    folder = Path(folder)
    doc = {"format": "jacobiflow", "version": 1, "family": flow.family, "config": asdict(flow.config)}
    if flow.target is not None:
        doc["target"] = flow.target
    text = json.dumps(doc, indent=2) + "\n"
    doc = json.loads(text)  # tuples as the lists that a reader will see
    tensors = {name: _stored(name, value, dtype) for name, value in flow.state_dict().items()}
    header = {"jacobiflow": f"{_mark(doc)} {checksum(tensors)}"}  # one entry: their order is random

    def put(name: str, text: str) -> None:
        write_atomically(folder / name, lambda path: Path(path).write_text(text, encoding="utf-8"))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = _present(folder)
        same = old is not None and _mark(old) == _mark(doc)
        if old is not None and not same:
            put(CONFIG, json.dumps(doc | {"previous": old}, indent=2) + "\n")
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata=header))
        put(CONFIG, text)
        if card is not None or not same or not (folder / CARD).exists():
            put(CARD, default_card(flow) if card is None else card)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from None


def _stored(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor as it goes to disk; numbers that the type cannot hold are refused."""
    dtype = dtype or value.dtype
    if dtype not in DTYPES.values():
        raise CheckpointError(f"weights are stored as float64, float32, float16 or bfloat16, not {dtype}")
    found = value.detach().to("cpu", dtype).contiguous()
    if dtype != value.dtype and bool((found.isinf() & value.detach().cpu().isfinite()).any()):
        raise CheckpointError(f"tensor {name!r} has values too large for {dtype}: use a wider type")
    return found


def _mark(doc: Mapping[str, Any]) -> str:
    """What names a config in the header of its weights."""
    plain = json.dumps([doc.get("family"), doc.get("config")], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _present(folder: Path) -> dict[str, Any] | None:
    """The config of the checkpoint that is in `folder` now, if there is one that can be read."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as f:
            return _choose(_read_doc(folder / CONFIG), _header(f)[0])
    except (OSError, SafetensorError, ValueError):
        return None


def default_card(flow: Flow, source: str = "this folder") -> str:
    """A model card that says what the flow itself knows."""
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
    """A flow from a bundled name, a checkpoint folder, or a hub id ("user/model").

    revision: commit, tag or branch of a hub id. Without one, the newest commit is looked up and
    that very commit is loaded; `flow.revision` says which.
    """
    if not isinstance(source, str | Path):
        raise CheckpointError(f"a model is a name, a folder or a hub id, not {short(source)}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype must be a type of floats such as torch.float32, not {short(dtype)}")
    folder, commit = _find(source, revision)
    try:
        place = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError):  # which of them, differs between kinds of devices
        raise CheckpointError(f"this torch sees no device {short(device)}") from None
    flow = _read(folder, dtype).to(device=place)
    flow.eval()
    flow.revision = commit
    return flow


def _find(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """The folder of a checkpoint; for a hub id also its commit."""
    path, name = Path(source), str(source)
    try:
        there = path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot read {short(name)}: {error.strerror}") from None
    if name in bundled_names():
        path = Path(str(files(MODELS) / name))
    elif there and not path.is_dir():
        raise CheckpointError(f"{name} is a file; a checkpoint is a folder with {CONFIG} and {WEIGHTS}")
    elif not there and isinstance(source, str) and HUB_ID.fullmatch(source):
        return _download(source, revision)
    elif not there:
        known = ", ".join(bundled_names()) or "none installed: pip install jacobiflow-models"
        raise CheckpointError(
            f"no model {name!r}: give a bundled name ({known}), a checkpoint folder or a hub id"
        )
    if revision is not None:
        raise CheckpointError(f"revision belongs to hub ids; {name!r} is on this machine")
    return path, None


def bundled_names() -> list[str]:
    """The models of the distribution jacobiflow-models; none where it is not installed."""
    try:
        folder = files(MODELS)
    except ModuleNotFoundError:
        return []
    return sorted(f.name for f in folder.iterdir() if f.is_dir() and (f / CONFIG).is_file())


def _read(folder: Path, dtype: torch.dtype) -> Flow:
    path, doc = folder / WEIGHTS, _read_doc(folder / CONFIG)
    try:
        check_plain(path, "it is not a plain file")
        with safe_open(path, framework="pt") as f:
            mark, total = _header(f)
            doc = _choose(doc, mark)
            family, config = parse_config(doc, folder / CONFIG)
            _check_tensors(f, config, path)
            tensors = {name: f.get_tensor(name) for name, _ in config.shapes()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {WEIGHTS}: it is not a checkpoint") from None
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if total and total != checksum(tensors):
        raise CheckpointError(f"{path} is damaged: its numbers are not those that were saved")
    try:
        with torch.random.fork_rng(devices=[]):  # the first weights are thrown away
            flow: Flow = family(config).to(dtype)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    flow.load_state_dict(tensors)
    flow.target = doc.get("target")
    if not isinstance(flow.target, dict | None):
        raise CheckpointError(f"{folder / CONFIG}: target must be a table, not {short(flow.target)}")
    return flow


def _read_doc(path: Path) -> dict[str, Any]:
    """config.json as plain data of our format."""
    try:
        doc = parse_json(read_text(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(doc, dict) or doc.get("format") != "jacobiflow":
        raise CheckpointError(f'{path} is not a jacobiflow config ("format": "jacobiflow" is missing)')
    if doc.get("version") != 1:
        raise CheckpointError(f"{path}: this release reads version 1, not {short(doc.get('version'))}")
    return doc


def _header(f: Any) -> tuple[str, str]:
    """`_mark` of the config and `checksum` that a save wrote with the weights; "" where others wrote."""
    mark, _, total = (f.metadata() or {}).get("jacobiflow", "").partition(" ")
    return mark, total


def _choose(doc: dict[str, Any], mark: str) -> dict[str, Any]:
    """The config that weights with this mark go with: `doc`, or the one that it was to replace."""
    previous = doc.get("previous")
    if isinstance(previous, dict) and mark != _mark(doc):
        return previous
    return {key: value for key, value in doc.items() if key != "previous"}


def parse_config(doc: Mapping[str, Any], path: Path) -> tuple[type[Any], Any]:
    """The family and config of a checkpoint."""
    name = doc.get("family")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{path}: family must be one of {', '.join(FAMILIES)}, not {short(name)}")
    family, kind = FAMILIES[name]
    try:
        return family, build(kind, doc.get("config"), "config")
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_tensors(f: Any, config: Any, path: Path) -> None:
    """Names, shapes and types of the tensors in an open file must be those of `config`."""
    left = set(f.keys())
    for name, shape in config.shapes():
        if name not in left:
            raise CheckpointError(f"{path}: tensor {name!r} is missing")
        left.remove(name)
        piece = f.get_slice(name)
        if tuple(piece.get_shape()) != shape:
            want = ", ".join(map(short, shape))
            raise CheckpointError(
                f"{path}: tensor {name!r} is {list(piece.get_shape())}, its config says [{want}]"
            )
        if piece.get_dtype() not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has type {piece.get_dtype()}, not a float")
    if left:
        raise CheckpointError(f"{path}: tensor {short(min(left))} is not part of this model")


# The hub


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError("hub ids need huggingface_hub: pip install 'jacobiflow[hub]'") from None
    return huggingface_hub


def _download(repo: str, revision: str | None) -> tuple[Path, str]:
    """The checkpoint's files at one commit, from the hub or the local cache, and that commit."""
    hub = _hub()
    try:
        folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=[CONFIG, WEIGHTS, CARD]))
    except Exception as error:  # the hub client raises many kinds; each becomes one line
        raise CheckpointError(
            f"there is no folder {repo!r}, and the hub does not give it: {_reason(hub, error)}"
        ) from None
    cache = folder.resolve().parents[2:3]  # <cache>/models--user--model/snapshots/<commit>
    for name in (CONFIG, WEIGHTS):
        if cache and not (folder / name).resolve().is_relative_to(cache[0]):
            raise CheckpointError(f"{repo}: {name} is a link that leaves the hub's cache")
    return folder, folder.name


def _reason(hub: Any, error: Exception) -> str:
    """Why the hub client failed, in one line."""
    known = {
        "GatedRepoError": "its owner must grant access first; ask on its page, then `hf auth login`",
        "RepositoryNotFoundError": "no such model, or it is private (then `hf auth login`)",
        "RevisionNotFoundError": "it has no such revision",
        "IncompleteSnapshotError": "the local cache has only a part of it and there is no connection",
        "LocalEntryNotFoundError": "no connection to the hub, and it is not in the local cache",
    }
    for name, text in known.items():
        if isinstance(error, getattr(hub.errors, name, ())):
            return text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def push_to_hub(
    flow: Flow,
    repo: str,
    *,
    private: bool = False,
    message: str = "Upload a flow",
    dtype: torch.dtype | None = None,
    card: str | None = None,
) -> str:
    """Upload `flow` as a checkpoint to `repo` ("user/model"); returns the new commit's address.

    dtype, card: as in `save`.
    """
    hub = _hub()
    with tempfile.TemporaryDirectory() as folder:
        save(flow, folder, dtype=dtype, card=card or default_card(flow, repo))
        try:
            hub.create_repo(repo, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message))
        except Exception as error:
            raise CheckpointError(f"cannot upload to {repo!r}: {_reason(hub, error)}") from None
