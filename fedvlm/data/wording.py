"""What the text tower is told: the names of classes (names=) and the phrases that are made of them (template=).

With several templates a class's embedding is the mean of the normalised embeddings of its phrases, normalised again
(Radford et al. 2021).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from fedvlm.backbones.base import Backbone
from fedvlm.config.key_files import templates_of
from fedvlm.core.tasks import CLASSIFICATION
from fedvlm.data.source import Source, existing
from fedvlm.data.store import text_embeddings
from fedvlm.errors import FedvlmError, nearest

CODE = re.compile(r"[\W\d_]*|[\W_]*([a-z]{1,2}|class|label|category|cls|id|folder)[\W_]*\d[\W\d_]*", re.IGNORECASE)


def renamed(source: Source, names: str) -> Source:
    """The source with its classes' names from a file: JSON (folder → name, or a list in the order of the folders) or CSV
    (folder, name)."""
    if not names:
        return source
    if source.task_type is not CLASSIFICATION or source.embeddings is not None:
        raise FedvlmError(
            f"names={names}: it is for images in folders by class, and data={source.name} is something else"
        )
    by_folder = read_names(names, source.classes)
    for folder in source.classes:
        if folder not in by_folder:
            raise FedvlmError(f"names={names} has no name for the class {folder}; {nearest(folder, by_folder)}")
    used: dict[str, str] = {}
    for folder in source.classes:
        other = used.setdefault(by_folder[folder], folder)
        if other != folder:
            raise FedvlmError(f"names={names}: the classes {other} and {folder} are both called {by_folder[folder]}")
    return replace(source, items=tuple(replace(i, label=by_folder[i.label]) for i in source.items))


def read_names(names: str, classes: Sequence[str]) -> dict[str, str]:
    path = existing(names, "names", "give a .json or .csv file of folder and name")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            found = json.loads(text)
        else:
            rows = [row for row in csv.reader(text.splitlines()) if row]
            found = {row[0].strip(): row[1].strip() for row in rows}
    except (OSError, ValueError, IndexError, csv.Error, RecursionError) as error:
        raise FedvlmError(f"names={names}: cannot be read as JSON or as CSV of folder,name ({error})") from None
    if isinstance(found, list):
        if len(found) != len(classes):
            raise FedvlmError(
                f"names={names} is a list of {len(found)} names, and there are {len(classes)} classes; give folder → name"
            )
        found = dict(zip(sorted(classes, key=by_number), found, strict=True))
    if not isinstance(found, dict) or not all(isinstance(n, str) and n.strip() for n in found.values()):
        raise FedvlmError(f'names={names}: expected a name for each folder, such as {{"1": "pink primrose"}}')
    return {str(folder): name.strip() for folder, name in found.items()}


def by_number(name: str) -> tuple[bool, int, str]:
    """Numbers as such (2 before 10), then the others by letters."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def doubtful_names(classes: Sequence[str]) -> str:
    """A warning where most of the names are numbers or codes, which say nothing to a text tower; else ""."""
    codes = [c for c in classes if CODE.fullmatch(c)]
    if 2 * len(codes) <= len(classes):
        return ""
    return (
        f"class names look like numbers or codes ({', '.join(codes[:3])}), of which a text tower knows nothing; "
        "names=FILE gives folder → name"
    )


def class_phrases(template: str, classes: Sequence[str]) -> tuple[str, ...]:
    """The phrase of each class; () with several templates, where no single one stands for it."""
    templates = templates_of(template)
    return tuple(filled(templates[0], classes)) if len(templates) == 1 else ()


def filled(template: str, classes: Sequence[str]) -> list[str]:
    return [template.replace("{}", name.replace("_", " ").lower()) for name in classes]


def class_embeddings(backbone: Backbone, template: str, classes: Sequence[str]) -> Tensor | None:
    """[classes, dim], L2-normalised; None where the backbone has no text tower."""
    templates = templates_of(template)
    phrases = [p for one in templates for p in filled(one, classes)]
    found = text_embeddings(backbone, phrases) if backbone.dim else None
    if found is None or len(templates) == 1:
        return found
    each = F.normalize(found, dim=-1).reshape(len(templates), len(classes), -1)
    return F.normalize(each.mean(0), dim=-1)
