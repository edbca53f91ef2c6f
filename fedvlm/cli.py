"""The command line: `fedvlm COMMAND [words] [key=value …]`. Keys are the fields of the dataclasses (see `fedvlm show`).

Only the chosen command's module is imported, so that commands without training answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NamedTuple, TypedDict

import fedvlm
from fedvlm.errors import FedvlmError, nearest
from fedvlm.names import printable


class Options(TypedDict, total=False):
    nargs: str
    metavar: str
    default: str | float
    help: str
    action: str
    choices: tuple[str, ...]
    type: type


class Argument(NamedTuple):
    name: str
    options: Options


class Command(NamedTuple):
    help: str
    arguments: tuple[Argument, ...] = ()


PAIRS = Argument("pairs", {"nargs": "*", "metavar": "key=value"})
RUNS = Argument("runs", {"nargs": "+", "metavar": "RUN"})
RUN = Argument("run", {"metavar": "RUN"})
KIT = Argument("kit", {"metavar": "KIT", "help": "a zip file of `fedvlm federation init`, or its folder"})
METHOD = Argument("method", {"metavar": "METHOD", "help": "a name of `fedvlm ls methods`, or a recipe file"})
CSV = Argument("--csv", {"metavar": "FILE", "help": "also write the table as CSV"})
LATEX = Argument("--latex", {"metavar": "FILE", "help": "also write the table as LaTeX"})
CLIENT = Argument(
    "--client", {"default": "", "metavar": "NAME", "help": "that client's own model instead of the shared one"}
)
SELECT = Argument(
    "--select",
    {"choices": ("last", "selected"), "default": "last", "help": "the last round, or the one chosen on validation"},
)
TRUST = Argument(
    "--trust",
    {
        "action": "store_true",
        "help": "allow what a folder from others would do (run its code, contact a host, read paths); without it the "
        "command says what that is, and does nothing",
    },
)
DRY = Argument("--dry", {"action": "store_true", "help": "show clients, classes, bytes and time; train nothing"})
COMMANDS = {
    "demo": Command("four methods on real images, from nothing, in about a minute", (PAIRS, CSV)),
    "run": Command("run one method", (METHOD, PAIRS, CSV, DRY)),
    "bench": Command(
        "run several methods alike and compare",
        (Argument("words", {"nargs": "+", "metavar": "METHOD|key=value"}), CSV, LATEX),
    ),
    "reproduce": Command(
        "the tables of the papers: list them, run one, and see ours beside theirs",
        (
            Argument("words", {"nargs": "*", "metavar": "PAPER|TABLE|key=value"}),
            Argument(
                "--dry", {"action": "store_true", "help": "say what is there, missing, and its cost; train nothing"}
            ),
            Argument(
                "--rehearse", {"action": "store_true", "help": "on made-up data and small models, within a minute"}
            ),
            CSV,
        ),
    ),
    "compare": Command("a table from run folders", (RUNS, CSV, LATEX, SELECT)),
    "report": Command(
        "one static page from run folders", (RUNS, Argument("--out", {"default": "report.html", "metavar": "FILE"}))
    ),
    "convert": Command(
        "data of other projects as data= takes it: LEAF's json (leaf), CoOp's split files (coop)",
        (
            Argument("kind", {"choices": ("leaf", "coop")}),
            Argument("source", {"metavar": "SOURCE"}),
            Argument("out", {"metavar": "OUT", "help": "a new folder, or a .jsonl file for texts"}),
            PAIRS,
        ),
    ),
    "resume": Command("go on with runs that were stopped", (RUNS, TRUST)),
    "predict": Command(
        "classify images with a run or an exported folder",
        (
            RUN,
            Argument("images", {"nargs": "+", "metavar": "IMAGE|FOLDER"}),
            CLIENT,
            TRUST,
            CSV,
            Argument(
                "--masks", {"metavar": "FOLDER", "default": "", "help": "write predicted masks there (segmentation)"}
            ),
        ),
    ),
    "export": Command(
        "a folder to deploy from",
        (RUN, Argument("--out", {"metavar": "FOLDER", "help": "default: RUN/export"}), CLIENT, TRUST),
    ),
    "attack": Command(
        "what embeddings that clients sent reveal about their images",
        (
            RUNS,
            Argument("--what-if", {"action": "store_true", "help": "also with other protections than the run's own"}),
            TRUST,
            CSV,
        ),
    ),
    "ls": Command(
        "what there is",
        (
            Argument(
                "what",
                {
                    "choices": ("methods", "presets", "adapters", "local", "merges", "metrics", "engines", "data"),
                },
            ),
        ),
    ),
    "show": Command(
        "a method with every key, or a run: what it did",
        (METHOD, PAIRS, Argument("--yaml", {"action": "store_true", "help": "as a complete recipe file"})),
    ),
    "init": Command("start a recipe of your own", (Argument("file", {"metavar": "NAME.yaml"}), PAIRS)),
    "cache": Command(
        "the feature store: list, prune",
        (
            Argument("--prune", {"action": "store_true", "help": "remove views (all, or those named)"}),
            Argument(
                "--older",
                {"type": float, "default": 0.0, "metavar": "DAYS", "help": "only views not written for so long"},
            ),
            Argument("views", {"nargs": "*", "metavar": "VIEW"}),
        ),
    ),
    "federation": Command(
        "a federation across machines: make its kits (init), add a site (add), ask who is there (status)",
        (
            Argument("what", {"choices": ("init", "add", "status")}),
            Argument("words", {"nargs": "*", "metavar": "SITE|KIT|key=value"}),
        ),
    ),
    "serve": Command("run a federation's server: home= backbone=", (KIT, PAIRS)),
    "join": Command("run a site of a federation: data= backbone= rules= home=", (KIT, PAIRS)),
    "ledger": Command(
        "what left a site, or what a run's server received",
        (
            Argument("ledgers", {"nargs": "*", "metavar": "FILE|FOLDER", "help": "default: every site of this user"}),
            Argument("--verify", {"action": "store_true", "help": "only check that no line was changed or removed"}),
            Argument("--compare", {"metavar": "RUN", "help": "compare with what this run's server received"}),
            CSV,
        ),
    ),
    "doctor": Command("what is wrong with this machine, and the fix"),
    "encode-server": Command("serve a backbone's embeddings over HTTP: backbone= host= port= texts=true", (PAIRS,)),
    "completion": Command(
        'a script for completion in your shell: eval "$(fedvlm completion bash)"',
        (Argument("shell", {"choices": ("bash", "zsh", "fish")}),),
    ),
}
COLLECTS = ("words", "pairs", "images", "runs", "views", "ledgers")  # arguments that take any number of words


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["complete"]:  # called by the shell's completion script
        from fedvlm.commands.completion import complete

        print("\n".join(complete(words[-1] if len(words) > 1 else "")))
        return 0
    args = _parse(words)
    try:
        importlib.import_module(f"fedvlm.commands.{args.command.replace('-', '_')}").main(args)
        return 0
    except FedvlmError as error:
        if args.debug:
            raise
        print(f"fedvlm: {shown(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nfedvlm: stopped; what was saved stands (`fedvlm resume`)", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except Exception as error:
        if args.debug:
            raise
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):  # torch's
            print(f"fedvlm: the memory is full ({shown(error)}); choose smaller sizes, or jobs=1", file=sys.stderr)
            return 1
        name = type(error).__name__
        print(f"fedvlm: {name}: {shown(error)}\n(this is a defect; --debug shows where)", file=sys.stderr)
    return 1


def shown(error: Exception) -> str:
    """Its lines without control characters; all but the first are indented, so that no name in them passes for a message
    of ours."""
    return "\n  ".join(printable(line.strip()) for line in str(error).splitlines()[:20])


def _parse(words: list[str]) -> argparse.Namespace:
    """Words may stand before and behind options: argparse alone stops collecting them at the first option."""
    parser = _parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"no command '{words[0]}'; {nearest(words[0], COMMANDS)}")
    args, rest = parser.parse_known_args(words)
    for word in rest:
        home = next((n for n in COLLECTS if hasattr(args, n)), None)
        if home is None or word.startswith("-"):
            parser.error(f"unrecognised: {word}")
        getattr(args, home).append(word)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fedvlm", description=(fedvlm.__doc__ or "").split("\n")[0])
    parser.add_argument("--version", action="version", version=fedvlm.__version__)
    known = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        sub = known.add_parser(name, help=command.help, description=command.help)
        for argument in command.arguments:
            sub.add_argument(argument.name, **argument.options)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
