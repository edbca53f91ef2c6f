"""Keys whose value may be a file (template=, classes=, split=), read when a run is set up: the run's record then holds
what the file said. Imports nothing heavy."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

from fedvlm.errors import FedvlmError

CLIP = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)  # the seven of CLIP's notebook "Prompt engineering for ImageNet", spelled as there
LISTS = (".txt", ".json", ".csv")


def templates_of(template: str) -> tuple[str, ...]:
    """template=: clip, lines, or phrases separated by commas. A piece without {} belongs to the phrase before it, as in
    "a photo of a {}, a type of flower"."""
    if template == "clip":
        return CLIP
    found = list[str]()
    for piece in template.split("\n" if "\n" in template else ","):
        if found and "{}" not in piece and "\n" not in template:
            found[-1] += f",{piece}"
        elif piece.strip():
            found.append(piece.strip() if found else piece)
    for one in found or [template]:
        if "{}" not in one:
            raise FedvlmError(f"template='{one}' must hold {{}} where the class name goes")
    return tuple(found)


def with_files_read(given: Mapping[str, object]) -> dict[str, object]:
    """What the user gave, with the content of files in place of their names."""
    read = dict(given)
    template, classes, split = given.get("template"), given.get("classes"), given.get("split")
    if isinstance(template, str) and "{}" not in template and template.endswith(LISTS):
        read["template"] = "\n".join(lines_of("template", template))
    elif isinstance(template, list | tuple):
        read["template"] = "\n".join(map(str, template))
    if isinstance(classes, str) and "," not in classes and classes.endswith(LISTS):
        read["classes"] = lines_of("classes", classes)
    if isinstance(split, str) and split.endswith(".json"):
        read["split_file"] = read.pop("split")
    return read


def lines_of(key: str, name: str) -> list[str]:
    """The texts that a file lists: a JSON list, the first column of a .csv, or one on each line."""
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            found = json.loads(text)
        elif path.suffix == ".csv":
            found = [row[0] for row in csv.reader(text.splitlines()) if row]
        else:
            found = text.splitlines()
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FedvlmError(f"{key}={name}: cannot be read ({reason})") from None
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise FedvlmError(f"{key}={name}: expected a list of texts")
    kept = [x.strip() for x in found if x.strip()]
    if not kept:
        raise FedvlmError(f"{key}={name}: there is nothing in it")
    return kept
