"""What a run needs to go on: weights, optimiser, step; written atomically, read without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from jacobiflow.core.types import JacobiflowError
from jacobiflow.flows.checkpoint import write_atomically

FILE = "state.safetensors"


class StateError(JacobiflowError, ValueError):
    """A run's state that cannot be used."""


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: dict[str, Tensor] | None,
    about: dict[str, Any],
) -> None:
    """Everything that resuming needs. Data order, noise and schedule follow from seed and step."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    for p, slots in optimizer.state.items():
        for slot, value in slots.items():
            tensors[f"optimizer.{slot}.{names[p]}"] = torch.as_tensor(value)
    for name, value in (ema or {}).items():
        tensors[f"ema.{name}"] = value
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    meta = {"about": json.dumps(about)}
    write_atomically(folder / FILE, lambda path: save_file(tensors, path, metadata=meta))


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: dict[str, Tensor] | None,
) -> dict[str, Any] | None:
    """Restore in place; returns what `save_state` was told `about`, or None if there is no state."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as f:
            about = json.loads(f.metadata()["about"])
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        model.load_state_dict(_part(tensors, "model."))
        slots: dict[str, dict[str, Tensor]] = {}
        for key, value in _part(tensors, "optimizer.").items():
            slot, _, name = key.partition(".")
            slots.setdefault(name, {})[slot] = value
        for name, p in model.named_parameters():
            if name in slots:
                optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in slots[name].items()}
        for name, value in _part(tensors, "ema.").items():
            assert ema is not None
            ema[name].copy_(value)
    except (SafetensorError, KeyError, TypeError, RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StateError(
            f"{path} does not fit this recipe or is damaged ({reason}); use a new --out"
        ) from None
    return dict(about)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
