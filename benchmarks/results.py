"""docs/results.md from run folders: a table for each data set and protocol that was run with enough seeds.

    python benchmarks/results.py runs/claims                              # prints
    python benchmarks/results.py runs/claims --write                      # docs/results.md

Rows of one table have the same data, backbone, partition, rounds, examples and scores. Where a method was run with several
learning rates (benchmarks/claims.py tries a grid on the first seed), the row is the one that all seeds have, chosen on
validation. --write replaces the tables that these folders have, and keeps the others (own.py, reference.py and defaults.py
write some). Nothing in the document is written by hand; what a table says about a paper's claim is in docs/claims.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

import rows

from fedvlm.core.records import RunRecord
from fedvlm.report.tables import summarise
from fedvlm.system.table import Table
from fedvlm.training.folder import RunFolder, find_runs

DOCUMENT = Path(__file__).parent.parent / "docs" / "results.md"
TOLD = ("rounds", "split", "shots", "score", "unseen_split", "personal_split", "protocol")  # by titles, in this order
TOLD += ("partition", "clients", "alpha", "participation", "corrupt", "domains")
LEFT_OUT = ("shared", "private", "seconds")  # columns: counted in `fedvlm compare`, and seconds depend on the machine
WORDS = {"partition": "auto", "shots": 0, "score": "own", "unseen_split": "test", "personal_split": "test"}  # defaults
HEAD = """# Results
Written by `python benchmarks/results.py` from run folders, and by the commands that titles name; not edited by hand.

- Test accuracy in % of the last round, ± standard deviation over seeds, with mini-clip, split 60/20/20, unless a table \
says otherwise. mini-clip is a hundredth of the size of the papers' backbones: their numbers stand beside ours where there \
are any, and are no aim.
- One rule for all rows of a table; where its notes say nothing else, the learning rate of a row is chosen on validation, \
on the first seed, from one grid for all methods (the recipe's × 0.3, 1, 3).
- [Measures](compare.md#how-to-read-a-table); worst 10 %: P of the worst tenth of the clients. MB up/round: sum over clients.
- Bold: best by [the rule](compare.md#best-and-level), in tables of before 2026-11-19 by more than two standard errors of \
the paired difference over seeds.
- FOCoOp's rows of before 2026-11-18 have `penalty=100 outsider_penalty=20`, and those of 2026-11-16 `fusion=0.8` in place \
of the paper's 0.2. Rows of `fedot`, its family and `fedlt` of before 2026-11-19 have a constant rate, not a cosine.

What the tables say of the papers' claims: [claims](claims.md). The price of privacy: [privacy](privacy.md). Our own \
method: [moments](moments.md); its rows are of `solver=ridge priors=0`.
"""
COMMON = ("MB up/round:", "best by more than two standard errors", "test accuracy in %, last round; ±")  # said in HEAD
USUAL = re.compile(
    r"; backbone mini-clip; split 60/20/20(?=;)|^the paper's numbers were measured with another .*?(?=: )"
)
MEASURES = re.compile(r"^(local|[GSP]|[a-z ,]+ \([A-Z]\)): .*?(; (?=scored on: )|$)")  # their definitions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--seeds", type=int, default=5, help="rows with fewer are left out")
    parser.add_argument("--rows", type=int, default=3, help="tables with fewer are left out")
    parser.add_argument("--write", action="store_true", help="docs/results.md")
    args = parser.parse_args()
    done = [run for run in find_runs(args.folders) if run.done]
    groups = tables_of(done, args.seeds)
    kept = {title: runs for title, runs in groups.items() if len({row_of(r.record) for r in runs}) >= args.rows}
    made = {
        title: f"{markdown(summarise(runs, fair=True))}{further_notes(done, title)}"
        f"- written on {date.today()} from {len(runs)} runs\n"
        for title, runs in kept.items()
    }
    print("".join(f"\n## {title}\n{text}" for title, text in sorted(made.items())))
    if args.write:
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), made), encoding="utf-8")


def written(document: str, made: Mapping[str, str]) -> str:
    """The document with these tables in place of those of the same title."""
    found = {title: briefly(text) for title, text in {**sections(document), **made}.items()}
    return HEAD + "".join(f"\n## {title}\n{text.strip()}\n" for title, text in sorted(found.items()))


def briefly(text: str) -> str:
    """A table without the notes that stand at the head of the document."""
    lines = []
    for line in text.splitlines():
        note = briefer(line.removeprefix("- ")) if line.startswith("- ") else ""
        if not line.startswith("- "):
            lines.append(line.replace(" / ", "/"))  # three numbers of a paper in one cell
        elif note and not note.startswith(COMMON):
            lines.append(f"- {note}")
    return "\n".join(lines)


def briefer(note: str) -> str:
    return USUAL.sub(lambda found: "" if found[0].startswith(";") else "paper", MEASURES.sub("", note))


def write_section(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Puts a table of another benchmark into the document, with its notes and the date."""
    dated = [*notes, f"written on {date.today()}"]
    text = "\n".join([rows.markdown(head, lines), "", *(f"- {note}" for note in dated)]) + "\n"
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), {title: text}), encoding="utf-8")


def sections(document: str) -> dict[str, str]:
    """The text of each table, by title."""
    return dict(part.split("\n", 1) for part in document.split("\n## ")[1:])


def tables_of(runs: Sequence[RunFolder], seeds: int) -> dict[str, list[RunFolder]]:
    """By title: the runs of rows that so many seeds have."""
    grouped: dict[str, dict[str, dict[str, list[RunFolder]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run in runs:
        record = run.record
        grouped[title_of(record)][row_of(record)][str(record.local.settings.get("lr"))].append(run)
    found: dict[str, list[RunFolder]] = {}
    for title, by_row in grouped.items():
        for rates in by_row.values():
            chosen = max(rates.values(), key=len)
            if len({run.record.seed for run in chosen}) >= seeds:
                found.setdefault(title, []).extend(chosen)
    return found


def further_notes(runs: Sequence[RunFolder], title: str) -> str:
    """Where no row of a table had an lr to choose from, and how many updates a method took that has the choice."""
    tried: dict[str, set[str]] = defaultdict(set)
    found = set()
    for record in (run.record for run in runs if title_of(run.record) == title):
        tried[row_of(record)].add(str(record.local.settings.get("lr")))
        if budget := record.local.settings.get("budget"):
            found.add(
                f"- {record.method.label}: budget={budget} (same: as many updates as FedAvg, double: twice as many)"
            )
    if all(len(rates) == 1 for rates in tried.values()):
        found.add(f"- learning rates were given, not chosen: {', '.join(sorted(set.union(*tried.values())))}")
    return "".join(f"{note}\n" for note in sorted(found))


def title_of(record: RunRecord) -> str:
    """Data, backbone and what of the protocol differs from the defaults; `summarise` refuses runs that differ in more."""
    alike = {k: record.config[k] for k in TOLD if k in record.config}
    if record.config.get("partition") == "auto" and len(record.data.domains) > 1:
        alike = {k: v for k, v in alike.items() if k not in ("clients", "alpha")}  # a client for each domain
    usual = {"participation": 1.0, "corrupt": 0, "domains": 0, "split": [60.0, 20.0, 20.0], **WORDS}
    said = [f"{k}={shown(v)}" for k, v in alike.items() if v != usual.get(k) and v not in ("", None)]
    if outsiders := str(record.config.get("outsiders") or ""):
        said.append(f"outsiders={Path(outsiders).name}")
    chosen = f", {len(record.data.classes)} classes" if record.config.get("classes") else ""
    return f"{record.data.name}{chosen}: {', '.join(said)}"


def shown(value: object) -> str:
    return (
        "/".join(map(shown, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def row_of(record: RunRecord) -> str:
    parts = {"adapter": record.adapter, "local": record.local, "merge": record.merge}
    settings = {home: [p.name, {k: v for k, v in p.settings.items() if k != "lr"}] for home, p in parts.items()}
    return json.dumps([record.method.name, record.method.on, settings, bool(record.config.get("gaps"))], sort_keys=True)


def markdown(table: Table) -> str:
    return "\n".join([*lines(table), "", *(f"- {note}" for note in table.notes if "fedvlm predict" not in note)]) + "\n"


def lines(table: Table) -> Iterator[str]:
    columns = [c for c in table.columns if c not in LEFT_OUT]
    yield "| " + " | ".join(map(table.title, columns)) + " |"
    yield "|" + " --- |" * len(columns)
    for row in table.rows:
        cells = [f"**{row.get(c, '')}**" if table.is_bold(row, c) else row.get(c, "") for c in columns]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
