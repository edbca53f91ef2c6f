"""The layout of a repository on the Hugging Face hub: an export without what is known on this machine only. Uploads
nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from fedvlm.config.trust import links
from fedvlm.errors import FedvlmError
from fedvlm.predict.export.card import name_only
from fedvlm.predict.export.folder import read_record
from fedvlm.system import files

LAYOUT = ("README.md", "adapter.safetensors", "classifier.safetensors", "example.py", "model.onnx", "model.json")
FOLDERS = ("backbone", "code")


def push(export: Path, folder: Path) -> list[str]:
    """Copies an export to a new folder; returns the files' names. Paths of this machine are left out of config.json."""
    about = read_record(export)
    if not (export / "README.md").is_file():
        raise FedvlmError(f"{export} has no model card (README.md); export its run again with this version of fedvlm")
    if found := [need.what for need in links(export)]:
        raise FedvlmError(f"{export} holds {found[0]}; nothing is copied through links, so remove it first")
    if folder.exists() and any(folder.iterdir()):
        raise FedvlmError(f"{folder} is not empty; give a new folder")
    here = replace(about, backbone=replace(about.backbone, name=name_only(about.backbone.name)))
    here = replace(here, method=replace(about.method, path=""))
    names = [n for n in LAYOUT if (export / n).is_file()]
    inside = [p.relative_to(export) for d in FOLDERS for p in sorted((export / d).rglob("*")) if p.is_file()]
    with files.writing(folder, "make room there, or give another folder"):
        for name in [*map(Path, names), *inside]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export / name, folder / name)
    files.write(folder / "config.json", here.to_json())
    return ["config.json", *names, *(p.as_posix() for p in inside)]
