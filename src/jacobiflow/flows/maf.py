from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class MAFConfig:
    features: int = 1
