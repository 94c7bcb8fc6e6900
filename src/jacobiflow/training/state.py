"""The state of a run, from which it resumes: weights, optimizer, step. Written atomically, without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jacobiflow.core.files import STATE, STATE_ERRORS, checksum, read_state, write_atomically
from jacobiflow.core.results import JacobiflowError, one_line

FILE = STATE
CONTENT = "checksum of the training images"


class TrainingError(JacobiflowError):
    """A run that cannot start, resume or continue."""


@dataclass(frozen=True)
class State:
    """All that a resumed run needs. Data order, noise and schedule follow from settings and step."""

    folder: Path
    settings: dict[str, Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: nn.Module | None
    more: Mapping[str, Any] = field(default_factory=dict)  # what others need to load the weights

    def save(self, step: int) -> None:
        """Write the state after `step` steps."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        for p, slots in self.optimizer.state.items():
            for slot, value in slots.items():
                tensors[f"optimizer.{slot}.{names[p]}"] = torch.as_tensor(value)
        if self.average is not None:
            tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        about = {"version": 2, "step": step, "settings": self.settings, **self.more}
        meta = {"about": json.dumps(about | {"checksum": checksum(tensors, json.dumps(about))})}
        write_atomically(self.folder / FILE, lambda path: save_file(tensors, path, metadata=meta))

    def load(self) -> int:
        """Restore in place what `save` wrote. Returns its step, or 0 if there is no state."""
        path = self.folder / FILE
        if not path.exists():
            return 0
        try:
            about, tensors = read_state(path)
            saved, step, now = dict(about["settings"]), int(about["step"]), self.settings
            names = [k for k in now if k in saved and now[k] != saved[k]]
            if not names:
                self._restore(tensors)
        except STATE_ERRORS as error:
            wrong = f"{path} is damaged ({one_line(error)})"
            raise TrainingError(f"{wrong}: restore it, or start again in a new --out") from None
        if len(names) > 1:  # other settings may choose other images: name the settings only
            names = [k for k in names if k != CONTENT]
        if names:
            changed = "; ".join(f"{k} {saved[k]}, now {now[k]}" for k in names)
            what = f"{self.folder} holds a run with other settings ({changed})"
            raise TrainingError(f"{what}: use those, or start again in a new --out")
        return step

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        self.model.load_state_dict(_part(tensors, "model."))
        if self.average is not None:
            self.average.load_state_dict(_part(tensors, "average."))
        stored = _part(tensors, "optimizer.")
        known = sorted({key.partition(".")[0] for key in stored})  # the slots of this optimizer
        for name, p in self.model.named_parameters():
            slots = {slot: stored[f"{slot}.{name}"] for slot in known if f"{slot}.{name}" in stored}
            if any(slot != "step" and v.shape != p.shape for slot, v in slots.items()):
                raise ValueError(f"its optimizer state of {name} has another shape")
            if slots:
                self.optimizer.state[p] = {slot: v if slot == "step" else v.to(p.device) for slot, v in slots.items()}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
