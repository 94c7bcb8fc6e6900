"""Checkpoints: a folder with config.json, model.safetensors and README.md (the model card).

Nothing is unpickled and no code is loaded. Config and tensors are compared with each other before
any weight is allocated.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jacobiflow.core.records import RecordError, build
from jacobiflow.core.types import JacobiflowError
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.maf import MAF, MAFConfig
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    TarFlow.family: (TarFlow, TarFlowConfig),
    MAF.family: (MAF, MAFConfig),
}
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FLOATS = {"F64", "F32", "F16", "BF16"}


class CheckpointError(JacobiflowError, ValueError):
    """A checkpoint that is not there, is damaged, or does not fit its config."""


def write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """Call write(name of a private file beside `path`), then move it to `path` in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(name)
        with open(name, "rb") as f:
            os.fsync(f.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save(
    flow: Flow, folder: str | Path, *, dtype: torch.dtype | None = None, card: str | None = None
) -> None:
    """Write `flow` into `folder`. dtype: how weights are stored (None: as they are)."""
    folder = Path(folder)
    doc = {"format": "jacobiflow", "version": 1, "family": flow.family, "config": asdict(flow.config)}
    tensors = {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in flow.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(doc, indent=2) + "\n"
        write_atomically(folder / WEIGHTS, lambda name: save_file(tensors, name))
        write_atomically(folder / CONFIG, lambda name: Path(name).write_text(text, encoding="utf-8"))
        page = card or default_card(flow)
        write_atomically(folder / CARD, lambda name: Path(name).write_text(page, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from None


def default_card(flow: Flow) -> str:
    """A model card that says what the flow itself knows."""
    rows = "\n".join(f"| {k} | {v} |" for k, v in asdict(flow.config).items())
    count = sum(p.numel() for p in flow.parameters())
    return (
        "---\nlibrary_name: jacobiflow\ntags: [normalizing-flow]\n---\n"
        f"# A {flow.family} flow\n\n{count:,} parameters. "
        'Load it with `jacobiflow.load("this folder")`.\n\n'
        f"| setting | value |\n|---|---|\n{rows}\n"
    )


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
    path = Path(source)
    commit = None
    if str(source) in bundled_names():
        folder = Path(str(files("jacobiflow") / "bundled" / str(source)))
    elif path.is_dir():
        folder = path
    elif path.exists():
        raise CheckpointError(f"{source} is a file; a checkpoint is a folder with {CONFIG} and {WEIGHTS}")
    elif isinstance(source, str) and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        folder, commit = _download(source, revision)
    else:
        known = ", ".join(bundled_names()) or "none"
        raise CheckpointError(
            f"no model {str(source)!r}: give a bundled name ({known}), a checkpoint folder or a hub id"
        )
    flow = _read(folder).to(device=device, dtype=dtype)
    flow.eval()
    flow.revision = commit
    return flow


def bundled_names() -> list[str]:
    """The models that come with the package."""
    folder = files("jacobiflow") / "bundled"
    return (
        sorted(f.name for f in folder.iterdir() if f.is_dir() and (f / CONFIG).is_file())
        if folder.is_dir()
        else []
    )


def _read(folder: Path) -> Flow:
    family, config = read_config(folder / CONFIG)
    tensors = _read_tensors(folder / WEIGHTS, config)
    flow: Flow = family(config)
    flow.load_state_dict(tensors)
    return flow


def read_config(path: Path) -> tuple[type[Any], Any]:
    """The family and config of a checkpoint."""
    try:
        doc = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(doc, dict) or doc.get("format") != "jacobiflow":
        raise CheckpointError(f'{path} is not a jacobiflow config ("format": "jacobiflow" is missing)')
    if doc.get("version") != 1:
        raise CheckpointError(f"{path}: this release reads version 1, not {doc.get('version')!r}")
    name = doc.get("family")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{path}: family must be one of {', '.join(FAMILIES)}, not {name!r}")
    family, kind = FAMILIES[name]
    try:
        return family, build(kind, doc.get("config"), "config")
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read_tensors(path: Path, config: Any) -> dict[str, Tensor]:
    """The tensors, once names, shapes and types are known to be those of `config`."""
    try:
        with safe_open(path, framework="pt") as f:
            left = set(f.keys())
            for name, shape in config.shapes():
                if name not in left:
                    raise CheckpointError(f"{path}: tensor {name!r} is missing")
                left.remove(name)
                piece = f.get_slice(name)
                if tuple(piece.get_shape()) != shape:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is {list(piece.get_shape())}, its config says {list(shape)}"
                    )
                if piece.get_dtype() not in FLOATS:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} has type {piece.get_dtype()}, not a float"
                    )
            if left:
                raise CheckpointError(f"{path}: tensor {min(left)!r} is not part of this model")
            return {name: f.get_tensor(name) for name, _ in config.shapes()}
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a checkpoint") from None
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {error}") from None


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
        folder = hub.snapshot_download(repo, revision=revision, allow_patterns=[CONFIG, WEIGHTS, CARD])
    except Exception as error:  # the hub client raises many kinds; each becomes one line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"cannot get {repo!r} from the hub: {reason}") from None
    return Path(folder), Path(folder).name


def push_to_hub(flow: Flow, repo: str, *, private: bool = False, message: str = "Upload a flow") -> str:
    """Upload `flow` as a checkpoint to `repo` ("user/model"); returns the new commit's address."""
    hub = _hub()
    with tempfile.TemporaryDirectory() as folder:
        save(flow, folder)
        try:
            hub.create_repo(repo, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message))
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(f"cannot upload to {repo!r}: {reason}") from None
