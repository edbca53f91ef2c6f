"""`fedvlm ledger [FILE|FOLDER …] [--verify] [--audit] [--budget] [--compare RUN] [--csv FILE]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm.cli.commands.output import write_rows
from fedvlm.errors import FedvlmError
from fedvlm.federation.ledger import RECEIVED, SENT, Entry, audit, compare, entries, verify
from fedvlm.system import console
from fedvlm.system.machine import data_home

COLUMNS = ["time", "run", "round", "step", "site", "tensors", "bytes", "sha256", "flags"]
SHOWN = 3  # tensors of a message that are named on the screen
NAMED = 18  # differences that are named


def main(args: argparse.Namespace) -> None:
    paths = find(args.ledgers)
    if args.verify:
        check(paths)
    elif args.audit:
        audited(paths)
    elif args.budget:
        budgets(paths)
    elif args.compare:
        against(paths, Path(args.compare), given=bool(args.ledgers))
    else:
        show(paths, args.csv)


def find(given: list[str]) -> list[Path]:
    """The ledgers there: files, and those in folders or in the homes of sites below them (FEDERATION/SITE)."""
    found: list[Path] = []
    for name in given or [str(data_home())]:
        path = Path(name).expanduser()
        below = [p for pattern in (SENT, RECEIVED, f"*/{SENT}", f"*/*/{SENT}") for p in sorted(path.glob(pattern))]
        if path.is_file():
            below = [path]
        if not below:
            raise FedvlmError(f"{path}: there is no {SENT} or {RECEIVED}; give the home of a site, or a run's folder")
        found += below
    return found


def check(paths: list[Path]) -> None:
    faults = [(p, fault) for p in paths if (fault := verify(p))]
    for path in paths:
        if path not in dict(faults):
            lines = list(entries(path))
            last = f", the last hash {lines[-1].hash}" if lines else ""
            console.line(f"{path}: every line is as it was written ({len(lines)} lines{last})")
    if faults:
        raise FedvlmError("\n".join(f"{p}, line {f.line}: {f.reason}" for p, f in faults))


def audited(paths: list[Path]) -> None:
    found = [f"{path}: {sentence}" for path in paths for sentence in audit(path)]
    if found:
        raise FedvlmError(
            "\n".join(["asked of this site, and not by an honest server (or not by these rules):", *found])
        )
    console.line("every request was one that the plans have, and every place was answered once")


def budgets(paths: list[Path]) -> None:
    """What each data set's releases spent, by run, and what is left by the site's rules."""
    from fedvlm.federation.agent import SITE, Home
    from fedvlm.federation.budget import Budget, entries, spent
    from fedvlm.federation.rules import Rules

    homes = [Home.read(p.parent) for p in paths if (p.parent / SITE).exists()]
    for data, rules in {home.data: Rules.read(home.rules) for home in homes}.items():
        found = entries(Budget.path_of(data))
        runs = dict.fromkeys((e.federation, e.run) for e in found)
        delta = min((e.delta for e in found), default=rules.delta)
        of_run = {r: [e.release for e in found if (e.federation, e.run) == r] for r in runs}
        rows = [[*run, str(len(some)), f"{spent(some, delta):.3g}"] for run, some in of_run.items()]
        total = spent([e.release for e in found], delta)
        console.rows(["federation", "run", "releases", "epsilon"], rows)
        left = f", {max(0.0, rules.epsilon - total):.3g} of {rules.epsilon:g} left" if rules.epsilon else ", no limit"
        console.note(f"{data}: epsilon={total:.3g} spent at delta={delta:.3g}{left}")


def against(paths: list[Path], run: Path, given: bool) -> None:
    """`given`: the ledgers were named. Of all that lie here, only those with messages of the run are compared: a hospital
    of the same name may be in another federation."""
    received = run / RECEIVED if run.is_dir() else run
    runs = {e.run for e in entries(received)}
    differences: list[str] = []
    sent = {path: list(entries(path)) for path in paths}
    mine = {p: lines for p, lines in sent.items() if given or not runs.isdisjoint(e.run for e in lines)}
    if not mine:
        raise FedvlmError(f"no ledger here has a message of {run}; give the home of the site that took part")
    for path, lines in mine.items():
        for site in sorted({e.site for e in lines}):
            found = compare(path, received, site)
            differences += [f"{site}: {d}" for d in found]
            if not found:
                console.line(f"{site}: the site's ledger and {received} agree")
    if differences:
        more = [f"and {len(differences) - NAMED} more"] if len(differences) > NAMED else []
        raise FedvlmError("\n".join(["the two sides differ:", *differences[:NAMED], *more]))


def show(paths: list[Path], csv: str | None) -> None:
    found = [e for path in paths for e in entries(path)]
    console.rows(COLUMNS, [row(e, SHOWN, 12) for e in found])
    runs: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        runs.setdefault((entry.run, entry.direction), []).append(entry)
    for (run, direction), lines in runs.items():
        total, steps = sum(e.bytes for e in lines), sorted({e.step for e in lines})
        console.note(f"{run}: {len(lines)} messages {direction}, {total:,} bytes, steps {', '.join(steps)}")
    if csv:
        write_rows(csv, COLUMNS, [row(e) for e in found])


def row(entry: Entry, most: int | None = None, digits: int | None = None) -> list[str]:
    """The cells of an entry, with at most so many tensors and digits of the hash (None: all)."""
    named = [f"{t.name}[{'×'.join(map(str, t.shape))}]" for t in entry.tensors[:most]]
    more = len(entry.tensors) - len(named)
    tensors = " ".join(named) + (f" and {more} more" if more else "")
    at = f"{entry.round}.{entry.exchange}"
    about = [entry.time, entry.run, at, entry.step, entry.site, tensors]
    return [*about, str(entry.bytes), entry.sha256[:digits], flags(entry)]


def flags(entry: Entry) -> str:
    marks = [name for name in ("clipped", "noised", "masked") if getattr(entry, name)]
    marks += [f"{name}: {text}" for name in ("refused", "note") if (text := getattr(entry, name))]
    return ", ".join(marks)
