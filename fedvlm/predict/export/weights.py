"""A backbone's files inside an export, so that it can be used where the backbone is not."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedvlm import backbones
from fedvlm.backbones.base import Backbone
from fedvlm.errors import FedvlmError
from fedvlm.predict.predictor import check_fingerprint
from fedvlm.system import files

BACKBONE = "backbone"  # the folder in an export
SUFFIXES = (".safetensors", ".json")  # nothing that could run code
TOKENIZER = ("merges.txt", "vocab.txt", "spiece.model", "tokenizer.model")


def files_of(backbone: Backbone) -> list[Path]:
    """Weights, configuration and tokeniser; an error where a backbone has no such files."""
    source = getattr(backbone, "folder", None)
    if not isinstance(source, Path):
        raise FedvlmError(
            f"--with-backbone: backbone={backbone.name} is no folder of weights, so there are no files to copy; leave it out"
        )
    return [p for p in sorted(source.iterdir()) if p.is_file() and (p.suffix in SUFFIXES or p.name in TOKENIZER)]


def copy_backbone(backbone: Backbone, to: Path) -> list[str]:
    """Returns the names of the copies, relative to the export."""
    found = files_of(backbone)
    with files.writing(to, "make room there, or export to another folder"):
        to.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copyfile(path, to / path.name)
    check_fingerprint(backbones.load(str(to)), backbone.fingerprint, str(to))
    return [f"{to.name}/{p.name}" for p in found]
