"""On real PACS where it lies beside the checkout; skipped where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedvlm.cli import main
from fedvlm.training.folder import RunFolder

PACS = Path(__file__).parents[3] / "shared" / "data" / "pacs"
CARD = {
    "photo": 0.664,
    "art_painting": 0.336,
    "cartoon": 0.459,
    "sketch": 0.440,
}  # balanced classes, from the model card


@pytest.mark.skipif(not PACS.is_dir(), reason="PACS is not beside this checkout")
def test_zero_shot_agrees_with_the_model_card_and_training_beats_it(tmp_path):
    """32 images a class and domain, so accuracy is known to about ±6 points (two standard errors of 224)."""
    for place in sorted(PACS.glob("*/*")):
        folder = tmp_path / "pacs" / place.relative_to(PACS)
        folder.mkdir(parents=True)
        images = sorted(place.iterdir())
        for image in images[:: len(images) // 32][:32]:
            (folder / image.name).symlink_to(image)
    words = [f"data={tmp_path / 'pacs'}", "unseen=sketch"]
    assert main(["run", "zero-shot", *words, "split=1,0,99", f"out={tmp_path / 'zero'}"]) == 0
    clients = RunFolder(tmp_path / "zero").record.finished.last["clients"]
    for domain, expected in CARD.items():
        assert clients[domain]["shared"]["test"] == pytest.approx(expected, abs=0.06), domain
    assert main(["run", "fedot", *words, "rounds=10", f"out={tmp_path / 'fedot'}"]) == 0
    first, *_, last = RunFolder(tmp_path / "fedot").rounds()
    assert last["P"] > first["P"] + 0.05
