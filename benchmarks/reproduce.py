"""Tables of the papers: list them, run one, and show our numbers beside the published ones (docs/reproduce.md).

python benchmarks/reproduce.py                                # the papers
python benchmarks/reproduce.py fedot                          # the tables of one
python benchmarks/reproduce.py fedot 1 data=PACS --dry        # what is there, what is missing, the cost
python benchmarks/reproduce.py fedot 1 data=PACS
python benchmarks/reproduce.py fedot 1 --rehearse             # on made-up data and small models, within a minute
python benchmarks/reproduce.py --publish                      # writes fedvlm/config/published.json of the tables
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from papers import published
from papers.manifest import Part, find, members, parts, runnable

from fedvlm.config.config import key_values
from fedvlm.errors import FedvlmError
from fedvlm.system import console
from fedvlm.system.interrupts import stoppable
from fedvlm.system.names import file_name

if TYPE_CHECKING:
    from papers.data import Found
    from papers.run import Planned, RowCost


def main(given: list[str] | None = None) -> int:
    """Parse the words, do what they say, and print an error in one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="PAPER|TABLE|key=value")
    parser.add_argument("--dry", action="store_true", help="show which data are missing, and the cost; train nothing")
    parser.add_argument("--rehearse", action="store_true", help="try it on made-up data and small models")
    parser.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    parser.add_argument("--publish", action="store_true", help="write the numbers that fedvlm shows beside its own")
    args = parser.parse_intermixed_args(given)
    try:
        with stoppable():
            published.write() if args.publish else reproduce(args)
    except FedvlmError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 1
    return 0


def reproduce(args: argparse.Namespace) -> None:
    """List papers or tables, or run what was named."""
    words = [w for w in args.words if "=" not in w]
    given: dict[str, object] = dict(key_values([w for w in args.words if "=" in w]))
    if len(words) > 2:
        raise FedvlmError(f"'{words[2]}': reproduce takes a paper, a table and key=value")
    if len(words) < 2:
        if given or args.rehearse or args.dry:
            raise FedvlmError("give a paper and a table, such as `reproduce.py fedot 1 data=FOLDER`")
        return list_tables(words[0]) if words else list_papers()
    chosen = find(words[0], words[1], str(given.pop("part", "")))
    picture = str(given.pop("figure", ""))
    methods = [m for m in str(given.pop("methods", "")).split(",") if m]
    if args.rehearse:
        from papers.rehearsal import rehearse

        chosen = [member for p in chosen for member in (members(p) if p.over else [p])]
        part = next((p for p in chosen if p.able), chosen[0])
        return rehearse(part, lambda found, small: show_part(part, found, small | given, methods, args, picture))
    if "data" not in given:
        raise FedvlmError(f"give data=FOLDER with {' or '.join(dict.fromkeys(p.data for p in chosen))}")
    data, outsiders = str(given.pop("data")), str(given.pop("outsiders", ""))
    if all(p.over for p in chosen):
        for part in chosen:
            show_mean(part, data, outsiders, given, methods, args, picture)
        return
    for part, found in located([p for p in chosen if not p.over], data, outsiders):
        show_part(part, found, given, methods, args, picture)


def list_papers() -> None:
    rows = []
    for name in published.paper_names():
        known, title = parts(name), published.paper(name).get("title", "")
        rows.append([name, str(len({p.table for p in known})), *counts(known), title])
    console.rows(["paper", "tables", "numbers", "rows", "can be run", "title"], rows)
    for name in published.paper_names():
        for reason, count in reasons(parts(name)).items():
            console.note(f"{name}: {count} rows cannot be run: {reason}")


def list_tables(paper: str) -> None:
    rows = []
    for part in parts(paper):
        budget = f"{part.keys.get('rounds', '')} × {len(part.keys['seeds'])}"  # type: ignore[arg-type]
        rows.append([part.table, part.name, *counts([part]), budget, part.backbone, part.missing or part.caption])
    console.rows(["table", "part", "numbers", "rows", "can be run", "rounds × seeds", "backbone", ""], rows)
    for reason, count in reasons(parts(paper)).items():
        console.note(f"{count} rows cannot be run: {reason}")


def counts(known: list[Part]) -> list[str]:
    """Published numbers, rows, and rows that can be run."""
    rows = [r for p in known for r in p.rows]
    return [str(sum(len(r.numbers) for r in rows)), str(len(rows)), str(sum(map(runnable, known)))]


def reasons(known: list[Part]) -> Counter[str]:
    """Why rows cannot be run, and how many."""
    known = [part for part in known if not part.over]  # their members say why
    found = [part.missing.partition(";")[0] or row.missing for part in known for row in part.rows]
    return Counter(filter(None, found))


def located(chosen: list[Part], data: str, outsiders: str) -> list[tuple[Part, Found]]:
    """The parts whose data set is in the folder."""
    from papers.data import locate

    out: list[tuple[Part, Found]] = []
    problems = [f"{p.table} ({p.name}): {p.missing}" for p in chosen if p.missing]
    for part in chosen:
        if part.missing:
            continue
        try:
            out.append((part, locate(part, data, outsiders)))
        except FedvlmError as error:
            problems.append(str(error))
    if not out:
        raise FedvlmError(problems[0])
    return out


def show_part(
    part: Part,
    found: Found,
    given: Mapping[str, object],
    methods: list[str],
    args: argparse.Namespace,
    picture: str = "",
) -> list[Planned]:
    """Checks, costs, runs and compares one part of a table; returns its rows with their runs."""
    from papers import run

    from fedvlm import api
    from fedvlm.cli.commands.output import write_rows

    pools = api.new_pools()
    planned = run.plan(part, found, given, pools, methods)
    for line in run.title(part, planned, found, given):
        console.line(line, "bold")
    able = [p for p in planned if p.setup]
    if any(p.waiting for p in able) and not args.rehearse:
        show_costs(run.costs(planned))
    if args.dry or not able:
        for p in planned:
            if p.reason:
                console.note(f"{p.row.title}: {p.reason}")
        return planned
    setup = able[0].setup
    problem = run.execute(planned, setup.config.jobs if setup else 0)
    run.ask(part, planned, found)
    table = run.compared(part, planned, found)
    console.show(table)
    if part.figure:
        run.draw(part, planned, place := picture or picture_name(part))
        console.line(f"{place}: {part.caption}")
    if args.csv:
        columns = list(table.values[0]) if table.values else table.columns
        write_rows(args.csv, columns, [["" if v is None else v for v in row.values()] for row in table.values])
    if problem:
        raise FedvlmError(problem)
    return planned


def picture_name(part: Part) -> str:
    return file_name(f"{part.paper} {part.table} {part.name}.png".lower().replace(" ", "-"))


def show_mean(
    part: Part,
    data: str,
    outsiders: str,
    given: Mapping[str, object],
    methods: list[str],
    args: argparse.Namespace,
    picture: str = "",
) -> None:
    """The members of a mean over data sets that are in the folder, then their mean."""
    from papers import run

    there = located(members(part), data, outsiders)
    results = [(member, show_part(member, found, given, methods, args), found) for member, found in there]
    if not args.dry:
        console.line(f"{part.title}, {part.name}: {part.caption}", "bold")
        console.show(run.mean_over(part, results))
        if part.figure:
            run.draw_curves(part, [planned for _, planned, _ in results], place := picture or picture_name(part))
            console.line(f"{place}: {part.caption}")


def show_costs(costs: list[RowCost]) -> None:
    rows = [
        [c.row.title, f"{c.runs} of {c.of}", str(c.rounds), f"{c.megabytes:.3g}", duration(c.seconds)] for c in costs
    ]
    console.rows(["row", "runs to do", "rounds", "MB in all", "time, one after the other"], rows)
    runs, seconds = sum(c.runs for c in costs), sum(c.seconds for c in costs)
    console.line(
        f"{runs} runs, {sum(c.megabytes for c in costs):.3g} MB, about {duration(seconds)} (jobs=N: N at once)"
    )


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
