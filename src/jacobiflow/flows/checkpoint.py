from __future__ import annotations
import json
from dataclasses import asdict
from pathlib import Path
from safetensors.torch import save_file

def save(flow, folder) -> None:
    folder = Path(folder); folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"format": "jacobiflow", "version": 1, "family": flow.family, "config": asdict(flow.config)}, indent=2) + "\n")
    save_file({k: v.contiguous() for k, v in flow.state_dict().items()}, folder / "model.safetensors")
