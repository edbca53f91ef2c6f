"""What a user has, compared with what a table needs: the folder's layout, domains and classes, and the backbone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedvlm.config.config import Setup
from fedvlm.core.tasks import NEXT_CHARACTER, SEGMENTATION
from fedvlm.data.source import NO_DOMAIN, Source, open_source
from fedvlm.errors import FedvlmError
from papers.manifest import LAYOUTS, DataSet, Part, data_sets


class Found(NamedTuple):
    """A user's data for a table."""

    path: str
    names: dict[str, str]  # the manifest's name of a domain → the folder's
    differs: str  # from the paper's data, in words; "": it looks the same
    outsiders: str = ""  # the folder of the table's outsiders, where it has some
    outsider_sets: Mapping[str, str] = MappingProxyType({})  # of auroc@NAME and fpr95@NAME: their folders, where found
    smaller: Mapping[str, object] = MappingProxyType({})  # a rehearsal's keys for the parts that have them


class Vision(NamedTuple):
    """An image tower, by the sizes in its config.json."""

    patch: int
    width: int
    layers: int
    dim: int


BACKBONES = {
    "CLIP ViT-B/32": Vision(32, 768, 12, 512),
    "CLIP ViT-B/16": Vision(16, 768, 12, 512),
    "CLIP ViT-L/14": Vision(14, 1024, 24, 768),
    "CLIP ResNet50": Vision(0, 64, 16, 1024),  # no patches; the channels of the stem, and blocks of all stages
}
CLIP_DEFAULTS = {
    "patch_size": 32,
    "hidden_size": 768,
    "num_hidden_layers": 12,
}  # of transformers, where a config is silent
ALEXNET, OPEN_CLIP = "AlexNet", "open_clip_config.json"
DEPTHS = {"ResNet50 from ImageNet": 50}  # networks that start from a file of weights (start=)


def locate(part: Part, data: str, outsiders: str = "") -> Found:
    """The data set in `data`, a folder that is the data set or has a folder of its name; an error where it is another."""
    wanted, root = data_sets()[part.data], Path(data).expanduser()
    path = _inside(root, wanted.name) or root
    source = _source(str(path))
    if (layout := _layout(source)) != wanted.layout:
        raise FedvlmError(_wrong(data, wanted, f"it is {layout}, and {wanted.layout} is needed"))
    names, differs = _domains(source, wanted, data), _classes(source, wanted, part)
    if not wanted.domains and wanted.layout == "class/image" and plain(path.name) != plain(wanted.name):
        known = {plain(name) for name in data_sets()}
        if differs or plain(path.name) in known:  # nothing but its classes and its name says what it is
            raise FedvlmError(_wrong(data, wanted, differs or f"its name is {path.name}"))
    sets = {name: str(p) for name in part.places("auroc", "fpr95") if (p := _near(root, name))}
    names |= {name: Path(p).name for name, p in sets.items()}  # as `fedvlm evaluate` calls them
    return Found(str(path), names, differs, outsiders or _outsiders(part, root), sets)


def _near(root: Path, name: str) -> Path | None:
    """What is called so inside or beside a folder."""
    return _inside(root, name) or _inside(root.absolute().parent, name)


def _outsiders(part: Part, root: Path) -> str:
    """The folder of the outsiders that the table names, inside or beside the data."""
    if not (name := str(part.keys.get("outsiders", ""))):
        return ""
    if found := _near(root, name):
        return str(found)
    raise FedvlmError(
        f"{part.title} needs images of no class ({name}): give outsiders=FOLDER, or put {name} beside the data"
    )


def _inside(root: Path, name: str) -> Path | None:
    """What a folder holds under this name."""
    there = sorted(root.iterdir()) if root.is_dir() else []
    return next((p for p in there if plain(p.name.split(".")[0]) == plain(name)), None)


@lru_cache(maxsize=4)
def _source(path: str) -> Source:
    return open_source(path)


def _layout(source: Source) -> str:
    if source.task_type is NEXT_CHARACTER:
        return "text"
    if source.task_type is SEGMENTATION:
        return "site/image+mask"
    return "class/image" if source.domains == [NO_DOMAIN] else LAYOUTS[0]


def _domains(source: Source, wanted: DataSet, data: str) -> dict[str, str]:
    there = {plain(d): d for d in source.domains}
    names = {}
    for name in wanted.domains:
        key = plain(name)
        near = [d for k, d in there.items() if not k.isdigit() and (k.startswith(key) or key.startswith(k))]
        if key not in there and len(near) != 1:
            raise FedvlmError(_wrong(data, wanted, f"no domain {name} in {_listed(source.domains)}"))
        names[name] = there.get(key, near[0] if near else "")
    if wanted.domains and not wanted.more_domains and (others := sorted(set(source.domains) - set(names.values()))):
        raise FedvlmError(_wrong(data, wanted, f"further domains {_listed(others)}"))
    return names


def _classes(source: Source, wanted: DataSet, part: Part) -> str:
    """In words, how the classes differ from the paper's: the names are part of the task, and no reason to stop."""
    there = {plain(c) for c in source.classes}
    if isinstance(kept := part.keys.get("classes"), list):  # the runs keep these
        there &= {plain(str(c)) for c in kept}
    if isinstance(wanted.classes, int):
        return f"{len(there)} classes instead of {wanted.classes}" if wanted.classes not in (0, len(there)) else ""
    if other := sorted(there ^ {plain(c) for c in wanted.classes}):
        return f"other classes than the paper's ({_listed(other)})"
    return ""


def plain(name: str) -> str:
    """A name without case and punctuation."""
    return re.sub(r"[\W_]+", "", name).lower()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _wrong(data: str, wanted: DataSet, problem: str) -> str:
    needs = f"; {wanted.title} has the domains {_listed(list(wanted.domains))}" if wanted.domains else ""
    return f"data={data} is not {wanted.title}: {problem}{needs}" + (f" ({wanted.get})" if wanted.get else "")


def other_backbone(part: Part, setup: Setup) -> str:
    """In words, what is used in place of the paper's backbone; "" where the sizes are the paper's."""
    name = setup.config.backbone
    if not part.backbone:
        return ""
    settings = setup.parts["adapter"].settings
    if part.backbone == ALEXNET:
        return "" if settings.get("width") == 64 else f"a narrower network (width {settings.get('width')})"
    if depth := DEPTHS.get(part.backbone):
        if settings.get("depth") != depth:
            return f"a network of depth {settings.get('depth')}"
        return "" if settings.get("start") else "random weights (start=FILE takes ImageNet's)"
    return "" if vision(name) == BACKBONES.get(part.backbone, Vision(0, 0, 0, 0)) else name


def vision(backbone: str) -> Vision | None:
    """The sizes of the image tower of a hub name, or of a folder in Hugging Face or open_clip format; None where they are
    not known."""
    if known := [v for title, v in BACKBONES.items() if plain(title.replace("CLIP ViT-", "")) in plain(backbone)]:
        if not Path(backbone).exists():
            return known[0]
    elif match := re.search(r"clip-vit-(base|large)-patch(\d+)$", backbone):
        sizes = {"base": (768, 12, 512), "large": (1024, 24, 768)}[match[1]]
        if not Path(backbone).exists():
            return Vision(int(match[2]), *sizes)
    folder = Path(backbone).expanduser()
    try:
        if (folder / OPEN_CLIP).exists():
            return _open_clip(json.loads((folder / OPEN_CLIP).read_text(encoding="utf-8"))["model_cfg"])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tower = CLIP_DEFAULTS | config["vision_config"]
        dim = config.get("projection_dim", 512)
        return Vision(tower["patch_size"], tower["hidden_size"], tower["num_hidden_layers"], dim)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open_clip(config: dict[str, Any]) -> Vision:
    tower, dim = config["vision_cfg"], config["embed_dim"]
    layers = tower.get("layers", 12)
    if isinstance(layers, list):  # a residual network's stages
        return Vision(0, tower.get("width", 64), sum(layers), dim)
    return Vision(tower.get("patch_size", 16), tower.get("width", 768), layers, dim)
