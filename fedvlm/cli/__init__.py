"""The command line: `fedvlm COMMAND [words] [key=value …]`. Keys are the fields of the dataclasses (see `fedvlm show`).

Only the chosen command's module is imported, so that commands without training answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

import fedvlm
from fedvlm.errors import FedvlmError, nearest
from fedvlm.system.interrupts import shell_line, stoppable
from fedvlm.system.names import printable


class Options(TypedDict, total=False):
    nargs: str
    metavar: str
    default: str | float | list[str]
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


PAIRS = Argument("pairs", {"nargs": "*", "default": [], "metavar": "key=value"})
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
FAIR = Argument(
    "--fair", {"action": "store_true", "help": "refuse rows that were not run under one protocol, instead of a note"}
)
TRUST = Argument(
    "--trust",
    {
        "action": "store_true",
        "help": "allow what a folder from others would do (run its code, contact a host, read paths); without it the "
        "command says what that is, and does nothing",
    },
)
WITH_BACKBONE = Argument(
    "--with-backbone", {"action": "store_true", "help": "copy the backbone's files into the folder"}
)
ONNX = Argument("--onnx", {"action": "store_true", "help": "also write image encoder and adapter as one ONNX file"})
DRY = Argument("--dry", {"action": "store_true", "help": "show clients, classes, bytes and time; train nothing"})
COMMANDS = {
    "demo": Command("compare five methods on bundled images, in a minute or two", (PAIRS, CSV)),
    "run": Command("run one method on one data set", (METHOD, PAIRS, CSV, DRY)),
    "bench": Command(
        "run several methods under the same protocol and compare them",
        (Argument("words", {"nargs": "+", "metavar": "METHOD|key=value"}), CSV, LATEX),
    ),
    "choose": Command(
        "find the method for your images: data= goal=new-clients|own-clients|both minutes=10 mb= private= methods=",
        (PAIRS, CSV),
    ),
    "compare": Command("print a table of finished runs", (RUNS, CSV, LATEX, SELECT, FAIR)),
    "report": Command(
        "write a self-contained HTML page of finished runs",
        (
            RUNS,
            Argument("--out", {"default": "report.html", "metavar": "FILE"}),
            Argument(
                "--details",
                {
                    "action": "store_true",
                    "help": "add confusion matrices, calibration, accuracy by class, features",
                },
            ),
            Argument(
                "--images",
                {
                    "action": "store_true",
                    "help": "add example images (private data); reads the runs' data",
                },
            ),
            Argument(
                "--tsne",
                {"action": "store_true", "help": "with --details: image features by t-SNE too; needs scikit-learn"},
            ),
            TRUST,
        ),
    ),
    "resume": Command("continue runs that were stopped", (RUNS, TRUST)),
    "predict": Command(
        "classify images with a run or an exported folder",
        (
            RUN,
            Argument("images", {"nargs": "+", "metavar": "IMAGE|FOLDER"}),
            CLIENT,
            Argument(
                "--top",
                {"type": int, "default": 1, "metavar": "N", "help": "the N most probable classes of each image"},
            ),
            Argument(
                "--backbone",
                {"default": "", "metavar": "PLACE", "help": "the same weights, where the recorded place has none"},
            ),
            TRUST,
            Argument(
                "--out",
                {"metavar": "FILE", "help": "write the table as CSV instead of printing it (also --csv)"},
            ),
            Argument("--csv", {"metavar": "FILE", "help": "as --out"}),
            Argument(
                "--masks", {"metavar": "FOLDER", "default": "", "help": "write predicted masks there (segmentation)"}
            ),
        ),
    ),
    "export": Command(
        "export a model as a folder that needs neither the run nor its data",
        (
            RUN,
            Argument("--out", {"metavar": "FOLDER", "help": "default: RUN/export"}),
            CLIENT,
            WITH_BACKBONE,
            ONNX,
            TRUST,
        ),
    ),
    "evaluate": Command(
        "evaluate finished runs on more data, without training: outsiders=A,B corrupt=fog,snow data=OTHER",
        (RUN, PAIRS, TRUST, CSV),
    ),
    "ls": Command(
        "list methods, parts, data, backbones or runs",
        (
            Argument(
                "what",
                {
                    "choices": (
                        *("methods", "presets", "adapters", "local", "merges", "metrics", "engines", "data"),
                        *("backbones", "runs"),
                    ),
                },
            ),
        ),
    ),
    "show": Command(
        "show a method with all of its keys, or what a run did",
        (METHOD, PAIRS, Argument("--yaml", {"action": "store_true", "help": "as a complete recipe file"})),
    ),
    "init": Command("write the start of your own recipe", (Argument("file", {"metavar": "NAME.yaml"}), PAIRS)),
    "cache": Command(
        "list or prune stored image features",
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
        "set up a federation across machines: make kits (init), add a site (add), list connected sites (status)",
        (
            Argument("what", {"choices": ("init", "add", "status")}),
            Argument("words", {"nargs": "*", "metavar": "SITE|KIT|key=value"}),
        ),
    ),
    "serve": Command("run a federation's server: home= backbone=", (KIT, PAIRS)),
    "join": Command(
        "run a site of a federation: data= backbone= rules= home=",
        (KIT, PAIRS, Argument("--check", {"action": "store_true", "help": "only say what could leave by its rules"})),
    ),
    "ledger": Command(
        "list what left a site, or what a run's server received",
        (
            Argument("ledgers", {"nargs": "*", "metavar": "FILE|FOLDER", "help": "default: every site of this user"}),
            Argument("--verify", {"action": "store_true", "help": "only check that no line was changed or removed"}),
            Argument("--audit", {"action": "store_true", "help": "say what no honest server asks; exit code 1"}),
            Argument(
                "--budget",
                {"action": "store_true", "help": "what private runs spent of each data set"},
            ),
            Argument("--compare", {"metavar": "RUN", "help": "compare with what this run's server received"}),
            CSV,
        ),
    ),
    "doctor": Command("check this machine and suggest fixes"),
    "encode-server": Command("serve a backbone's embeddings over HTTP: backbone= host= port= texts=true", (PAIRS,)),
    "completion": Command(
        'print a completion script for your shell: eval "$(fedvlm completion bash)"',
        (Argument("shell", {"choices": ("bash", "zsh", "fish")}),),
    ),
}
FIRST_STEPS = """\
first steps:
  fedvlm demo                                         no data and no download needed
  fedvlm run fedot data=FOLDER --dry                  how your images are understood; trains nothing
  fedvlm choose data=FOLDER                           which method for these images, in ten minutes
  fedvlm bench fedot fedclip fedavg data=FOLDER       a table of methods
  fedvlm run fedot --help                             every key of a method
"""
GOES_ON = ("demo", "run", "bench", "choose", "resume")  # commands that, given again, go on where they stopped
AS_JSON = ("compare", "ls", "show", "choose")
COLLECTS = ("words", "pairs", "images", "runs", "views", "ledgers")  # arguments that take any number of words


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["complete"]:  # called by the shell's completion script
        from fedvlm.cli.commands.completion import complete

        print("\n".join(complete(words[-1] if len(words) > 1 else "")))
        return 0
    args = argparse.Namespace(command="help", debug=False) if _asks_for_keys(words) else _parse(words)
    try:
        with stoppable(), printing(args):
            if args.command == "help":
                from fedvlm.cli.commands.show import show_help

                show_help(_parser(), words)
            else:
                importlib.import_module(f"fedvlm.cli.commands.{args.command.replace('-', '_')}").main(args)
        return 0
    except FedvlmError as error:
        if args.debug:
            raise
        print(f"fedvlm: {shown(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        on = f"; continue with: {shell_line(['fedvlm', *words])}" if args.command in GOES_ON else ""
        print(f"\nfedvlm: stopped; everything written so far is kept{on}", file=sys.stderr)
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
        from fedvlm.parts.failures import fault_of

        print(f"fedvlm: {shown(fault_of(error))}\n(--debug shows more)", file=sys.stderr)
    return 1


@contextlib.contextmanager
def printing(args: argparse.Namespace) -> Iterator[None]:
    """Prints as --quiet, --json and --log say."""
    from fedvlm.system.console import Mode

    wanted = getattr(args, "json", False)
    before = Mode.quiet, Mode.log, Mode.collected
    Mode.quiet, Mode.collected = getattr(args, "quiet", False), {} if wanted else None
    try:
        with contextlib.ExitStack() as stack:
            if place := getattr(args, "log", None):
                try:
                    Mode.log = stack.enter_context(Path(place).open("a", encoding="utf-8"))
                except OSError as error:
                    raise FedvlmError(f"--log {place}: cannot be written ({error.strerror})") from None
            yield
            if Mode.collected is not None:
                print(json.dumps(Mode.collected, indent=1, ensure_ascii=False, default=str))
    finally:
        Mode.quiet, Mode.log, Mode.collected = before


def shown(error: Exception | str) -> str:
    """The error's lines without control characters; all but the first are indented, so that no name in them passes for
    a message of ours."""
    return "\n  ".join(printable(line.strip()) for line in str(error).splitlines()[:20])


def _asks_for_keys(words: list[str]) -> bool:
    """`fedvlm run METHOD --help`."""
    return words[:1] in (["run"], ["bench"]) and bool({"-h", "--help"} & set(words)) and not words[1].startswith("-")


def _parse(words: list[str]) -> argparse.Namespace:
    """Words may stand before and behind options: argparse alone stops collecting them at the first option."""
    parser = _parser()
    if not words:
        parser.print_help()
        parser.exit(2)
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"no command '{words[0]}'; {_meant(words[0])}")
    args, rest = parser.parse_known_args(words)
    for word in rest:
        home = next((n for n in COLLECTS if hasattr(args, n)), None)
        if home is None or word.startswith("-"):
            parser.error(f"unrecognised: {word}{_as_key(word, words)}")
        setattr(args, home, [*getattr(args, home), word])
    return args


def _meant(word: str) -> str:
    """The command that a word may mean: one that is spelt like it, or `run` before the name of a method."""
    from fedvlm.config import recipe

    if word in recipe.recipe_names():
        return f"{word} is a method: fedvlm run {word}"
    return nearest(word, COMMANDS)


def _as_key(word: str, words: list[str]) -> str:
    """`--lr 0.1` as lr=0.1, where there is such a key."""
    from fedvlm.config import catalogue

    known = catalogue.load()
    every = {k.name for k in known.run} | {
        k.name for kind in known.parts.values() for p in kind.values() for k in p.keys
    }
    name, _, value = word.lstrip("-").replace("-", "_").partition("=")
    if not word.startswith("--") or name not in every:
        return ""
    following = words[words.index(word) + 1 :][:1]
    value = value or next((w for w in following if "=" not in w and not w.startswith("-")), "…")
    return f"; keys are written {name}={value}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedvlm",
        description=(fedvlm.__doc__ or "").split("\n")[0],
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=fedvlm.__version__)
    known = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        sub = known.add_parser(name, help=command.help, description=command.help)
        for argument in command.arguments:
            sub.add_argument(argument.name, **argument.options)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.add_argument("--quiet", action="store_true", help="print results only: no progress, notes or warnings")
        sub.add_argument("--log", metavar="FILE", help="also write everything that is printed there, with times")
        if name in AS_JSON:
            sub.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser
