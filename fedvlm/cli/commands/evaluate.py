"""`fedvlm evaluate RUN [outsiders=A,B] [corrupt=fog,snow] [data=OTHER,…] [--csv FILE] [--trust]`"""

from __future__ import annotations

import argparse
import inspect

from fedvlm import api
from fedvlm.cli.commands.output import write_rows
from fedvlm.config.config import key_values
from fedvlm.errors import FedvlmError
from fedvlm.predict.questions import FOLDER, answers_table
from fedvlm.system import console

KEYS = [name for name in inspect.signature(api.Run.evaluate).parameters if name != "self"]


def main(args: argparse.Namespace) -> None:
    given = key_values(args.pairs)
    for key in given:
        if key not in KEYS:
            known = ", ".join(f"{k}=" for k in KEYS)
            raise FedvlmError(f"{key}=: evaluate takes {known} only; everything else is taken from the run")
    lines: list[list[str]] = []
    for run in api.runs(args.run, trust=args.trust):
        answers = answers_table(run.evaluate(**{k: v.split(",") for k, v in given.items()}))
        console.line(f"{run.record.method.label}, seed {run.record.seed}; written to {run.folder / FOLDER}")
        console.show(answers)
        lines += [[str(run.folder), *(row.get(c, "") for c in answers.columns)] for row in answers.rows]
    if args.csv:
        write_rows(args.csv, ["run", *answers.columns], lines)
