"""`fedvlm init NAME.yaml [like=METHOD] [key=value …]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm import api
from fedvlm.config import recipe
from fedvlm.config.config import key_values
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.system import console

START = """# A recipe of your own: fedvlm run {file}
# What you set here beats what {like} says, tuned settings included; the command line beats both.
title: {title}
# idea: one sentence that says what is new
like: {like}  # everything that is not said here
{adapter}  # or a file of your own: my_adapter.py (see docs/add-a-method.md)
{local}
{merge}
settings:{settings}
# every key with its value and meaning: fedvlm show {file}
"""


def axis_line(axis: str, given: dict[str, str], base: recipe.Recipe) -> str:
    """What the user chose, or as a comment what is inherited."""
    return f"{axis}: {given[axis]}" if axis in given else f"# {axis}: {getattr(base, axis)}"


def main(args: argparse.Namespace) -> None:
    path = Path(args.file)
    if path.suffix not in (".yaml", ".yml"):
        raise FedvlmError(f"init {path}: a recipe's name ends in .yaml")
    if path.exists():
        raise FedvlmError(f"{path} exists; choose another name, or edit it")
    given = dict(key_values(args.pairs))
    like = given.pop("like", "fedavg")
    base = recipe.load(like)
    chosen = api.describe(like, **given)  # refuses what `run` would refuse
    values = {f"{r.home}.{r.key.name}": r.value for r in chosen.keys} | {r.key.name: r.value for r in chosen.keys}
    lines = [f"\n  {key}: {api.yaml_value(values[key])}" for key in given if key not in registry.AXES]
    text = START.format(
        file=path,
        title=path.stem,
        like=like,
        settings="".join(lines) or " {}",
        **{axis: axis_line(axis, given, base) for axis in registry.AXES},
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FedvlmError(f"{path} cannot be written ({error.strerror})") from error
    console.line(f"{path}: edit it, then fedvlm run {path} (fedvlm show {path} lists every key)")
