"""`fedvlm completion bash|zsh|fish` prints a script; the script asks `fedvlm complete LINE` for the words that fit."""

from __future__ import annotations

import argparse
import re

from fedvlm.config import catalogue, recipe
from fedvlm.config.keys import Key
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry, user_code
from fedvlm.system.machine import runs_home

BASH = """_fedvlm() {
  local line="${COMP_LINE:0:$COMP_POINT}" current="${COMP_WORDS[COMP_CWORD]}" IFS=$'\\n'
  COMPREPLY=($(fedvlm complete "$line" 2>/dev/null))
  local word="${line##* }"
  if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then  # bash splits words at =
    COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
  fi
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _fedvlm fedvlm
"""
ZSH = """autoload -U +X bashcompinit && bashcompinit
_fedvlm() { COMPREPLY=($(fedvlm complete "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null)); }
complete -o default -o nospace -F _fedvlm fedvlm
"""
FISH = """complete -c fedvlm -f -a '(fedvlm complete (commandline -cp) 2>/dev/null)'
"""
PLAIN = re.compile(r"[\w./+@:,=~-]+")  # names that no shell takes for more than a name
TAKES_METHOD = ("run", "show", "bench")
TAKES_RUNS = ("compare", "report", "resume", "predict", "export", "evaluate")


def main(args: argparse.Namespace) -> None:
    print({"bash": BASH, "zsh": ZSH, "fish": FISH}[args.shell], end="")


def complete(line: str) -> list[str]:
    """The words that can stand at the end of this command line."""
    words = line.split(" ")[1:] or [""]
    before, current = [w for w in words[:-1] if w], words[-1]
    return sorted(c for c in candidates(before, current) if c.startswith(current))


def candidates(before: list[str], current: str) -> list[str]:
    from fedvlm.cli import COMMANDS

    if not before:
        return [*COMMANDS, "--help", "--version"]
    verb, given = before[0], dict(w.split("=", 1) for w in before[1:] if "=" in w)
    if verb not in COMMANDS:
        return []
    flags = [a.name for a in COMMANDS[verb].arguments if a.name.startswith("--")] + ["--debug", "--help"]
    choices = [c for a in COMMANDS[verb].arguments if not a.name.startswith("--") for c in a.options.get("choices", ())]
    named = [w for w in before[1:] if "=" not in w and not w.startswith("-")]
    if "=" in current:
        key = current.partition("=")[0]
        return [f"{key}={value}" for value in values(key, named, given)]
    methods = recipe.recipe_names() if verb in TAKES_METHOD and (not named or verb == "bench") else []
    takes_keys = verb in (*TAKES_METHOD, "demo") and (named or verb == "demo")
    known = [f"{k.name}=" for k in keys(named, given)] + ["on=", "adapter=", "local=", "merge="] if takes_keys else []
    unused = [k for k in known if k[:-1] not in given]
    folders = run_folders() if verb in TAKES_RUNS else []
    return [*(flags if current.startswith("-") else []), *(choices if not named else []), *methods, *unused, *folders]


def run_folders() -> list[str]:
    try:
        found = [str(p.parent) for p in runs_home().glob("*/run.json")]
        return [name for name in found if PLAIN.fullmatch(name)]
    except OSError:
        return []


def keys(named: list[str], given: dict[str, str]) -> list[Key]:
    found = list(catalogue.load().run)
    if not named:
        return found
    try:
        chosen = recipe.load(named[0], given.get("on", ""))
        for axis in registry.AXES:
            if axis in given or not user_code.is_own(
                getattr(chosen, axis)
            ):  # a recipe's code does not run on pressing a key
                found += catalogue.keys(axis, given.get(axis, getattr(chosen, axis)))
    except FedvlmError:
        pass  # an unfinished name: the run's own keys still fit
    return found


def values(key: str, named: list[str], given: dict[str, str]) -> list[str]:
    if key == "on":
        return recipe.presets()
    if key in registry.KINDS:
        return registry.names(key) + (["auto"] if key == "engine" else [])
    if key == "metrics":
        return registry.names("metric")
    for found in keys(named, given):
        if found.name == key:
            return ["true", "false"] if found.type == "bool" else [str(c) for c in found.choices]
    return []
