"""The command line: `fedvlm COMMAND [words] [key=value …]`. Keys are the fields of the dataclasses (see `fedvlm show`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import fedvlm
from fedvlm import commands
from fedvlm.core import FedvlmError

Argument = tuple[str, dict[str, Any]]

PAIRS: Argument = ("pairs", {"nargs": "*", "metavar": "key=value"})
RUNS: Argument = ("runs", {"nargs": "+", "metavar": "RUN"})
RUN: Argument = ("run", {"metavar": "RUN"})
METHOD: Argument = ("method", {"metavar": "METHOD"})
CSV: Argument = ("--csv", {"metavar": "FILE", "help": "also write the table as CSV"})
LATEX: Argument = ("--latex", {"metavar": "FILE", "help": "also write the table as LaTeX"})
CLIENT: Argument = (
    "--client",
    {"default": "", "metavar": "NAME", "help": "that client's own model, not the shared one"},
)
SELECT: Argument = (
    "--select",
    {"choices": ("last", "selected"), "default": "last", "help": "the last round, or the one chosen on validation"},
)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        args.go(args)
        return 0
    except FedvlmError as error:
        if args.debug:
            raise
        print(f"fedvlm: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nfedvlm: stopped; what was saved stands (`fedvlm resume`)", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except Exception as error:
        if args.debug:
            raise
        print(f"fedvlm: {type(error).__name__}: {error}\n(this is a defect; --debug shows where)", file=sys.stderr)
    return 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Words may stand before and behind options: argparse alone stops collecting them at the first option."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    for word in rest:
        home = next((n for n in ("words", "pairs", "images", "runs") if hasattr(args, n)), None)
        if home is None or word.startswith("-"):
            parser.error(f"unrecognised: {word}")
        getattr(args, home).append(word)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fedvlm", description=fedvlm.__doc__)
    parser.add_argument("--version", action="version", version=fedvlm.__version__)
    known = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(go: Callable[[argparse.Namespace], None], text: str, *arguments: Argument) -> None:
        sub = known.add_parser(go.__name__.replace("_", "-"), help=text, description=text)
        for flag, options in arguments:
            sub.add_argument(flag, **options)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(go=go)

    dry = ("--dry", {"action": "store_true", "help": "show clients, classes, bytes; train nothing"})
    command(commands.demo, "four methods on real images, from nothing, in about a minute", PAIRS, CSV)
    command(commands.run, "run one method", METHOD, PAIRS, CSV, dry)
    words = ("words", {"nargs": "+", "metavar": "METHOD|key=value"})
    command(commands.bench, "run several methods alike and compare", words, CSV, LATEX)
    command(commands.compare, "a table from run folders", RUNS, CSV, LATEX, SELECT)
    page = ("--out", {"default": "report.html", "metavar": "FILE"})
    command(commands.report, "one static page from run folders", RUNS, page)
    command(commands.resume, "go on with runs that were stopped", RUNS)
    images = ("images", {"nargs": "+", "metavar": "IMAGE|FOLDER"})
    masks = ("--masks", {"metavar": "FOLDER", "default": "", "help": "write the masks there, where masks were learned"})
    command(commands.predict, "classify images with a run or an exported folder", RUN, images, CLIENT, CSV, masks)
    out = ("--out", {"metavar": "FOLDER", "help": "default: RUN/export"})
    command(commands.export, "a folder to deploy from", RUN, out, CLIENT)
    what_if = ("--what-if", {"action": "store_true", "help": "also with other protections than the run's own"})
    command(commands.attack, "what embeddings that clients sent give away of their images", RUNS, what_if, CSV)
    what = ("what", {"choices": ("methods", "adapters", "local", "merges", "data")})
    command(commands.ls, "what there is", what)
    command(commands.show, "a method, resolved, with every key", METHOD, PAIRS)
    prune = ("--prune", {"action": "store_true", "help": "remove views (all, or those named)"})
    older = (
        "--older",
        {"type": float, "default": 0.0, "metavar": "DAYS", "help": "only views not written for so long"},
    )
    command(
        commands.cache, "the feature store: list, prune", prune, older, ("views", {"nargs": "*", "metavar": "VIEW"})
    )
    command(commands.doctor, "what is wrong with this machine, and the fix")
    command(commands.encode_server, "serve a backbone's embeddings over HTTP: backbone= host= port= texts=true", PAIRS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
