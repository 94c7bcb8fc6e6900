"""Every bundled model has a card: what it is, samples, data, recipe, training log, figures, licence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from jacobiflow.flows.checkpoint import bundled_names

MODELS = Path(__file__).parent.parent / "models/src/jacobiflow_models"


@pytest.mark.parametrize("name", bundled_names())
def test_a_card_is_complete(name: str) -> None:
    folder = MODELS / name
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f'jf.load("{name}")' in card
    assert "ecipe\n" in card
    assert "`jacobiflow train " in card
    assert "## Licence\n" in card
    for picture in re.findall(r"\]\(([^)]+\.png)\)", card):
        with Image.open(folder / picture) as image:
            low, high = image.convert("L").getextrema()
            assert high - low > 100, picture  # something is drawn
    assert "](samples.png)" in card
    has_log = "| epoch | step |" in card
    assert has_log == ("](training.png)" in card) == ("was not kept" not in card)
    commands = re.findall(r"`((?:python -m|make|jacobiflow) [^`]+)`", card)
    assert any("benchmarks" in c or "evaluate" in c for c in commands)  # what prints the figures
    for listing in re.findall(r"```json\n(.*?)```", card, re.DOTALL):
        assert len(json.loads(listing)["sweeps"]["uniform"]["per_block"]) > 1
