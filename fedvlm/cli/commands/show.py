"""`fedvlm show METHOD [key=value …] [--yaml]`, and `fedvlm show RUN`, the folder of a run"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from fedvlm import api
from fedvlm.config import recipe
from fedvlm.config.config import key_values
from fedvlm.errors import FedvlmError, nearest
from fedvlm.system import console
from fedvlm.system.formatting import counted, duration
from fedvlm.system.machine import runs_home
from fedvlm.training import places

SHORTEST = 0.05  # seconds of a phase that is shown
SCORES = ("G", "S", "P", "acc", "cacc", "auroc", "fpr95", "local", "base", "novel", "hm")


def main(args: argparse.Namespace) -> None:
    if args.method not in recipe.recipe_names() and not Path(args.method).is_file():
        if (found := places.named(args.method)) is not None:
            if (found / "run.json").is_file():
                return show_run(found)
            from fedvlm.studies.comparison import one_run  # imports torch

            return show_run(one_run(args.method, False, ["show", "{}"]).folder)
        if not args.pairs and "." not in args.method:
            known = [*recipe.recipe_names(), *(p.parent.name for p in runs_home().rglob("run.json"))]
            raise FedvlmError(f"{args.method}: no such method, recipe or run; {nearest(args.method, known)}")
    about = api.describe(args.method, **key_values(args.pairs))
    if args.yaml:
        print(about.to_yaml(), end="")
        return
    method = about.setup.method
    console.line(f"{method.title} {method.paper}")
    console.line(method.idea)
    show_keys(about)
    for data in recipe.published_data(method.name, method.on):
        numbers = recipe.published(method.name, method.on, data)
        shown = ", ".join(f"{k} {v}" for k, v in numbers.items() if k != "source")
        console.note(f"published on {data}: {shown} ({numbers.get('source', '')})")


def show_keys(about: api.Description) -> None:
    lines, home = list[list[str]](), ""
    for row in about.keys:
        if row.home != home:
            home = row.home
            lines.append([home if home == "run" else f"{home}={about.setup.parts[home].name}", "", "", ""])
        lines.append([f"  {row.key.name}", api.shown(row.value), row.origin, row.key.help])
    console.rows(["key", "value", "from", "meaning"], lines)


def show_help(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """`fedvlm run METHOD --help`: the command's options, and then every key of the method."""
    with contextlib.suppress(SystemExit):
        parser.parse_args([words[0], "--help"])
    given = key_values([w for w in words[2:] if "=" in w]) if words[0] == "run" else {}
    show_keys(api.describe(words[1], **given))
    console.note("docs/keys.md lists the keys of all parts")


def show_run(folder: Path) -> None:
    """What was run, what came out, and what the mechanisms of its method did."""
    from fedvlm.evaluation.protocols import target
    from fedvlm.predict import questions
    from fedvlm.report.columns import DEFINED
    from fedvlm.report.effects import effects
    from fedvlm.report.tables import DASH, backbone_id, format_value, settings
    from fedvlm.training.folder import RunFolder

    run = RunFolder(folder)
    record = run.record
    console.line(f"{record.method.label} on {record.data.name} with {backbone_id(record)}, seed {record.seed}")
    held = target(record)
    rounds = run.rounds()
    done = "finished" if run.done else "not finished; `fedvlm resume` continues it"
    console.line(f"held out: {held}; {counted(rounds[-1]['round'] if rounds else 0, 'round')}, {done}")
    last = record.result.last if record.result else (rounds[-1] if rounds else {})
    named = {"S": last.get("shared", {}).get("test"), **last}
    scores = {k: v for k in SCORES if isinstance(v := named.get(k), int | float)}
    if scores.get("acc") == scores.get("P"):
        scores.pop("acc", None)
    names = {k: DEFINED[k].title.removesuffix(" %") if k in DEFINED else k for k in scores}
    console.rows(["score", "test, %"], [[names[k], f"{100 * v:.1f}"] for k, v in scores.items()])
    if record.result and record.result.phases:
        parts = sorted(((k, v) for k, v in record.result.phases.items() if v >= SHORTEST), key=lambda part: -part[1])
        console.line("time: " + ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in parts))
    if answers := questions.read_answers(folder):
        console.show(questions.answers_table(answers))
    found = effects(run)
    if found:
        console.rows(
            ["mechanism", "first round", "last round", "meaning"],
            [[e.name, DASH if e.first is None else f"{e.first:.4g}", f"{e.last:.4g}", e.meaning] for e in found],
        )
    else:
        console.note("this method records no numbers about its mechanism")
    console.rows(["key", "value"], [[k, format_value(v)] for k, v in settings(record).items()])
