"""What tests of acceleration share."""

from __future__ import annotations

from typing import Any

import pytest

from jacobiflow.adapters import inverter, patch


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the decoder returned, call by call."""
    calls: list[Any] = []
    decode = inverter.decode

    def kept(*args: Any, **options: Any) -> Any:
        calls.append(decode(*args, **options))
        return calls[-1]

    monkeypatch.setattr(inverter, "decode", kept)
    return calls


@pytest.fixture
def sweeps(decoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As `decoded`; the decoder also runs where it does not pay, by sweeps if there is no C kernel."""
    monkeypatch.setattr(patch, "winner", lambda key: None)
    monkeypatch.setattr(patch, "race", lambda key, ways, *rest: list(ways)[-1])
    return decoded
