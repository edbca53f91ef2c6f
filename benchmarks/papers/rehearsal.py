"""A table end to end within a minute: made-up data of the right layout, the embedded backbone, small networks, few rounds.

The numbers mean nothing. It shows that every row of a manifest can be run, and what the table will look like.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fedvlm.system import console
from fedvlm.training.planning import LEAVE_ONE_OUT
from papers.data import Found, locate
from papers.manifest import DataSet, Part, data_sets

SIDE = 32  # pixels
IMAGES = 5  # of each class in each domain: three to train on, one to validate, one to test
MOST_CLASSES, MORE_DOMAINS = 4, 3
OUTSIDERS = 99  # the colour of images of no class
PALETTES = 2  # domains that look different; encoding takes most of the time, and equal images are encoded once
SMALL: dict[str, dict[str, object]] = {  # network → keys that make it small
    "resnet": {"backbone": f"pixels:{SIDE}", "depth": 10, "width": 4},
    "alexnet": {"backbone": f"pixels:{SIDE}", "width": 2},
    "unet": {"backbone": f"pixels:{SIDE}", "width": 2, "levels": 2},
    "lstm": {"hidden": 8, "layers": 1, "stride": 40, "domains": 4},
}
SMALLER = {  # for the parts that have such a key
    "candidates": 128,  # nouns that are encoded; all of them take minutes
    "text_backbone": "mini-clip",
}


def rehearse(part: Part, play: Callable[[Found, dict[str, object]], object]) -> None:
    """Calls `play` with made-up data and the keys that make runs small."""
    wanted = data_sets()[part.data]
    console.note("a rehearsal on made-up data: the numbers mean nothing")
    with tempfile.TemporaryDirectory() as folder:
        data = made_up(wanted, Path(folder) / "data")
        sets = filter(None, [str(part.keys.get("outsiders", "")), *part.places("auroc", "fpr95")])
        for k, name in enumerate(dict.fromkeys(sets)):
            _pictures(Path(folder) / "data" / name, OUTSIDERS + k, random=np.random.default_rng(PALETTES))
        found = locate(part, str(data))._replace(smaller=SMALLER)
        play(found, small_keys(part, wanted) | {"out": f"{folder}/runs"})


def small_keys(part: Part, wanted: DataSet) -> dict[str, object]:
    """One round, two seeds, one held-out domain, and networks of a few parameters."""
    small: dict[str, object] = {"rounds": 1, "seeds": [1, 2], "batch": 8, "epochs": 1}
    small |= {"backbone": "mini-clip"} if part.backbone.startswith("CLIP") else {}
    for network in dict.fromkeys(row.on for row in part.rows):
        small |= SMALL.get(network, {})
    if part.keys.get("protocol") == LEAVE_ONE_OUT and "unseen" not in part.keys:
        small["unseen"] = [wanted.domains[0]]
    if "classes" in part.keys:
        small["classes"] = _classes(wanted)
    if wanted.layout == "class/image":
        small |= {"clients": 2, "participation": 1.0} | ({"per_client": 3} if part.keys.get("per_client") else {})
    if any("domains" in row.settings for row in part.rows):
        small["domains"] = len(wanted.domains) + MORE_DOMAINS
    return small


def made_up(wanted: DataSet, folder: Path) -> Path:
    """A folder with data of this layout, domains and (a few) classes, under its name."""
    folder.mkdir()
    if wanted.layout == "text":
        letters = np.random.default_rng(1).choice(list("to be or not "), (6, 600))
        roles = [{"role": f"role {k}", "text": "".join(text)} for k, text in enumerate(letters)]
        (folder / f"{wanted.name}.jsonl").write_text("\n".join(map(json.dumps, roles)), encoding="utf-8")
        return folder
    domains = [*wanted.domains, *(f"more {k}" for k in range(MORE_DOMAINS * wanted.more_domains))]
    for k, domain in enumerate(domains or [""]):
        random = np.random.default_rng(k % PALETTES)
        for label, name in enumerate(_classes(wanted)):
            _pictures(folder / wanted.name / domain / name, label, random, IMAGES if domains else 2 * IMAGES)
    return folder


def _classes(wanted: DataSet) -> list[str]:
    if wanted.layout == "site/image+mask":
        return ["image", "mask"]
    names = wanted.classes if isinstance(wanted.classes, tuple) else [f"class {k}" for k in range(MOST_CLASSES)]
    return list(names[:MOST_CLASSES])


def _pictures(folder: Path, label: int, random: np.random.Generator, count: int = IMAGES) -> None:
    """Noise around a colour of the class; masks where the folder is called so."""
    folder.mkdir(parents=True)
    colour = np.random.default_rng(label).integers(30, 220, 3)
    for number in range(count):
        noise = random.normal(0, 40, (SIDE, SIDE, 3))
        pixels = np.where(noise[..., 0] > 0, 255, 0) if folder.name == "mask" else np.clip(colour + noise, 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
