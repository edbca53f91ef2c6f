"""What a run or an export that came from others may do here: nothing, unless the user says so (`--trust`, `trust=True`).

Such a folder names code (parts that it holds, parts of installed packages, python: backbones), addresses and paths. What
lies inside the folder and what is fedvlm's own is free. What this user asked for here before, on the command line or in
Python, is remembered: code by a digest of the code itself, addresses and paths by their names. All else needs the word.

FEDVLM_TOKEN goes only to addresses that the user gave, or listed in FEDVLM_TOKEN_HOSTS (host:port, separated by commas):
`--trust` alone sends it nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.config import catalogue
from fedvlm.config.keys import Key, keys_of
from fedvlm.core.records import PartRecord, Settings
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.system.allowed import Need, absolute, allow, host_need, known, path_need
from fedvlm.system.names import printable

if TYPE_CHECKING:
    from fedvlm.config.config import Setup

PREDICTS = (*registry.AXES, "backbone")  # what a prediction uses of a run


def admitted(setup: Setup, folder: Path, trusted: bool = False, uses: Collection[str] = ()) -> Setup:
    """The setup that a folder holds, if the user trusts all that it would do; only the parts in `uses`, () is all.

    Its code is in memory since before it was looked at, so that what runs is what was looked at."""
    homes = {h: p for h, p in setup.parts.items() if not uses or h in uses}
    setup = replace(setup, parts=homes, codes={h: c for h, c in setup.codes.items() if h in homes})
    try:
        asked = [*needs(setup, uses), *links(folder)]
        unknown = [n for n in asked if not (trusted or known(n) or is_inside(n, folder))]
        if unknown:
            raise FedvlmError(trust_refusal(unknown))
        return replace(setup, parts={home: with_checked_settings(setup, home) for home in homes})
    except FedvlmError as error:
        raise FedvlmError(f"{folder}: {error}") from error


def trust_refusal(asked: list[Need]) -> str:
    by_verb = {need.does: [n.what for n in asked if n.does == need.does] for need in asked}
    would = "; ".join(f"{does} {', '.join(printable(w, 200) for w in what)}" for does, what in by_verb.items())
    return f"it would {would}. Nothing of this was done: look at it first, then give --trust (in Python: trust=True)"


def remember(setup: Setup) -> None:
    """Mark all that the user's own setup names as trusted."""
    for need in needs(setup):
        allow(need)


def remember_backbone(name: str) -> None:
    for need in backbone_needs(name):
        allow(need)


def needs(setup: Setup, uses: Collection[str] = ()) -> list[Need]:
    found = [need for home in setup.parts for need in part_needs(setup, home)]
    if not uses or "backbone" in uses:
        found += backbone_needs(setup.config.backbone)
    if "merge" in setup.parts and (other := setup.parts["merge"].settings.get("text_backbone")):
        found += backbone_needs(str(other))
    if not uses:
        paths = {key: getattr(setup.config, key) for key in catalogue.with_trait("path") if key != "backbone"}
        if kit := setup.config.federation:  # the data are at its sites
            found.append(Need("contact", f"the federation of {absolute(kit)}", ("federation", absolute(kit))))
            paths.pop("data")
        found += [path_need(key, path) for key, path in paths.items() if path not in ("", "emoji")]
    return found


def part_needs(setup: Setup, home: str) -> list[Need]:
    """What a part would do. If its name is not fedvlm's own, only what the folder itself holds or an installed package
    declares is ever imported."""
    kind, part = kind_of(home), setup.parts[home]
    code = setup.codes.get(home)
    if code is not None:
        what = f"{kind} {part.name} (in code/{home}, sha {code.seal[:8]})"
        return [Need("run code:", what, ("code", kind, code.entry, code.seal))]
    if part.name in registry.built_in(kind):
        return []
    declared = registry.installed(kind).get(part.name)
    if declared is None:
        raise FedvlmError(
            f"{kind}={printable(part.name, 100)}: no part of fedvlm or of an installed package, and its code is not there"
        )
    package = registry.installed_version(kind, part.name)
    return [Need("run code:", f"{kind} {part.name} (of {package})", ("installed", kind, part.name, declared, package))]


def kind_of(home: str) -> str:
    return "metric" if home.startswith("metric-") else home


def backbone_needs(name: str) -> list[Need]:
    from fedvlm import backbones  # imports torch

    form = backbones.form_of(name)
    if form == "http":
        return [host_need(name)]
    if form == "hub":
        return [Need("contact", f"the Hugging Face hub for {name}", ("hub", name))]
    if form == "python":
        from fedvlm.backbones.callable import seal_of

        seal = seal_of(name)
        mark = ("python", name.rpartition(":")[2], seal) if seal else ()
        return [Need("run code:", f"backbone {name} (sha {seal[:8] or 'unknown'})", mark)]
    if form == "installed":
        value = backbones.installed_backbones()[name.partition(":")[0]].value
        return [Need("run code:", f"backbone {name} (of an installed package, {value})", ("installed", name, value))]
    return [path_need("backbone", name.removeprefix("onnx:"))] if form in ("onnx", "folder") else []


def is_inside(need: Need, folder: Path) -> bool:
    return need.mark[:1] == ("path",) and Path(need.mark[1]).is_relative_to(absolute(folder))


def links(folder: Path) -> Iterator[Need]:
    """Symbolic links: through them a folder reaches files elsewhere. fedvlm makes none."""
    for place, folders, names in os.walk(folder):
        for path in (Path(place) / n for n in (*folders, *names)):
            if path.is_symlink():
                yield Need("follow", f"the link {path.relative_to(folder)} to {path.readlink()}", ())


def with_checked_settings(setup: Setup, home: str) -> PartRecord:
    """The part with settings that it has, of their types."""
    kind, part = kind_of(home), setup.parts[home]
    settings: Settings = {}
    keys = {k.name: k for k in _keys(setup, home)} if part.settings else {}
    for name, value in part.settings.items():
        if name not in keys:
            raise FedvlmError(f"{kind}={part.name} has no setting {name}; another version of fedvlm wrote it")
        absent = value is None and keys[name].default is None
        settings[name] = None if absent else keys[name].coerce(value, f"{kind}.{name}")
    return replace(part, settings=settings)


def _keys(setup: Setup, home: str) -> list[Key]:
    kind, part = kind_of(home), setup.parts[home]
    code, what = setup.codes.get(home), f"{kind}={part.name}"
    if kind == "engine":
        return []
    return keys_of(registry.only_part(kind, what, code.load(what))) if code else catalogue.keys(kind, part.name)
