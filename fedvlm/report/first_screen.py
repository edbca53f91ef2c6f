"""The first screen of a page: what was compared, the answer, four cards, the next command, and the ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedvlm.config import catalogue
from fedvlm.config.config import OPEN
from fedvlm.evaluation.protocols import target
from fedvlm.report.columns import DEFINED
from fedvlm.report.gains import FROZEN, Verdict, compared_measures, gain, verdicts
from fedvlm.report.headline import by_how_much
from fedvlm.report.lines import MethodLine, family_of
from fedvlm.report.svg import colour, element, hollow, marker
from fedvlm.report.tables import Groups
from fedvlm.system.formatting import counted
from fedvlm.system.interrupts import key_words, shell_line
from fedvlm.system.table import Table, Value

BEST_STATE, LEVEL_STATE = "best", "level"
SHOWN = 9  # rows of the ranking before "… more"


class Card(NamedTuple):
    title: str
    state: str  # best, level or ""
    big: str
    name: str
    style: str  # class of the name's colour
    text: str
    warns: bool = False


class Cell(NamedTuple):
    """One goal of a row of the ranking."""

    value: str
    state: str
    gap: str  # to the highest row
    strip: str  # SVG: the interval of the difference to the highest


class Row(NamedTuple):
    number: int
    name: str
    family: str
    style: str
    mark: str  # SVG
    cells: list[Cell]
    mb: str
    rounds: str


class First(NamedTuple):
    what: str
    winner: str  # "" where none is named
    style: str
    cards: list[Card]
    next: str
    goals: list[str]  # titles of the ranking's columns
    rows: list[Row]


def first_screen(table: Table, groups: Groups, lines: Sequence[MethodLine]) -> First:
    found = verdicts(table)
    by_label = {x.label: x for x in lines}
    lead = leader(table, found)
    goals = compared_measures(table.by_seed) or ["P"]
    strips = {m: strips_of(table, m, by_label) for m in goals}
    return First(
        what_was_compared(groups, lead),
        lead if any(v.best or v.level for v in found) else "",
        style_of(by_label.get(lead)),
        [*(goal_card(v, table, by_label) for v in found), *client_card(table, lead), *cost_card(table, lead, found)],
        next_command(groups, lead),
        [DEFINED[m].title for m in goals],
        [row_of(by_label[str(v["method"])], v, table, found, goals, strips) for v in table.values],
    )


def leader(table: Table, found: Sequence[Verdict]) -> str:
    """The method that the cards are about: that is best for a goal, else the highest; the frozen model only if alone."""
    names = [v.highest for v in sorted(found, key=lambda v: not v.best)] + [str(v["method"]) for v in table.values]
    return next((name for name in names if name != FROZEN), names[0])


def style_of(line: MethodLine | None) -> str:
    return colour(line.number, line.frozen) if line else ""


def what_was_compared(groups: Groups, lead: str) -> str:
    records = [r for group in groups.values() for r in group]
    held = {target(r) for r in records if r.unseen}
    first = groups[lead][0]
    parts = [
        first.data.name,
        first.backbone.name,
        counted(len(groups), "method"),
        counted(len(first.clients), "client"),
    ]
    parts.append(counted(len({r.seed for r in records}), "seed"))
    each = "each domain once held out as new" if len(held) > 1 else f"held out: {next(iter(held))}" if held else ""
    rounds = {r.rounds for r in records if r.rounds}
    return " · ".join([*parts, *([each] if each else []), counted(max(rounds, default=0), "round")])


def goal_card(v: Verdict, table: Table, lines: dict[str, MethodLine]) -> Card:
    values = table.by_seed[v.highest][v.measure].values()
    text = by_how_much(v.gain, v.rival).removeprefix(", ")
    higher, known = v.clients
    text += f"; higher on {higher} of {counted(known, 'client')}" if known > 1 else ""
    state = BEST_STATE if v.best else LEVEL_STATE if v.level else ""
    word = DEFINED[v.measure].word
    big = f"{sum(values) / len(values):.1f} %"
    return Card(word[:1].upper() + word[1:], state, big, v.highest, style_of(lines.get(v.highest)), f"{text}.")


def client_card(table: Table, lead: str) -> list[Card]:
    """The client that is served worst, and whether one is below the frozen model."""
    own = table.by_client.get(lead, {})
    new, personal = own.get("G", {}), own.get("P", {})
    scores = new or personal
    if len(scores) < 2:
        return []
    worst = min(scores, key=lambda name: scores[name])
    with_own = f"as a new client; {personal[worst]:.1f} % with its own model" if new and worst in personal else ""
    frozen = table.by_client.get(FROZEN, {})
    below = [c for m in ("G", "P") for c, v in own.get(m, {}).items() if v < frozen.get(m, {}).get(c, v)]
    losers = list(dict.fromkeys(below))
    told = f"{counted(len(losers), 'client')} below zero-shot: {', '.join(losers[:3])}" if losers else ""
    text = ". ".join(filter(None, (with_own, told or ("No client is below zero-shot" if frozen else ""))))
    return [Card("Weakest client", "", f"{scores[worst]:.1f} %", worst, "", f"{text}." * bool(text), bool(losers))]


def cost_card(table: Table, lead: str, found: Sequence[Verdict]) -> list[Card]:
    rows = {str(v["method"]): v for v in table.values}
    rival = next((n for v in found for n in (v.rival, v.highest) if n not in ("", lead, FROZEN)), "")
    big = f"{cost(rows[lead], 'rounds')} round{'s' * (rows[lead].get('rounds') != 1)}, {cost(rows[lead], 'mb')} MB"
    text = ""
    if rival:
        other = rows[rival]
        text = f"{rival}: {cost(other, 'rounds')} rounds, {cost(other, 'mb')} MB, and {cost(other, 'seconds')} s "
        text += f"instead of {cost(rows[lead], 'seconds')} s per run."
    return [Card(f"Cost of {lead}", "", big, "", "", text)]


def cost(row: dict[str, Value], key: str) -> str:
    value = row.get(key)
    return f"{value:.3g}" if isinstance(value, int | float) else "–"


def next_command(groups: Groups, lead: str) -> str:
    """What trains the method on all clients; of one method, what compares it."""
    record = groups[lead][0]
    of_bench = {*catalogue.with_trait("varies", "asker", "selection"), *catalogue.for_purpose("output", "engine")}
    given = {k: v for k, v in record.given.items() if k not in of_bench and (k != "protocol" or v == OPEN)}
    name = record.method.path or record.method.name
    command = ["bench", name, "moments", "fedavg"] if len(groups) < 2 else ["run", name]
    return shell_line(["fedvlm", *command, *key_words(given)])


def strips_of(table: Table, measure: str, lines: dict[str, MethodLine]) -> dict[str, Cell]:
    """The cells of one goal; bars are 95 % intervals of the difference to the highest row, drawn from its mean."""
    means = {n: sum(v.values()) / len(v) for n, s in table.by_seed.items() if (v := s.get(measure))}
    if not means:
        return {}
    highest = max(means, key=lambda n: means[n])
    gains = {n: gain(table.by_seed[n][measure], table.by_seed[highest][measure]) for n in means if n != highest}
    bars = {n: g.interval for n, g in gains.items() if g and g.seeds > 1}
    top = means[highest]
    span = max(means.values()) - min(means.values()) or 1.0
    low = min(means.values()) - 0.1 * span
    high = max([top, *(min(top + b[1], top + 0.5 * span) for b in bars.values())])

    def at(value: float) -> str:
        return f"{min(98.0, max(2.0, 4 + 92 * (value - low) / (high - low))):.1f}%"

    out = {}
    for name, mean in means.items():
        line = lines.get(name)
        parts = [element("line", cls="top", x1=at(top), x2=at(top), y1="2", y2="20")]
        if name in bars:
            ends = [at(top + side) for side in bars[name]]
            parts.append(element("line", cls="iv", x1=ends[0], x2=ends[1], y1="11", y2="11"))
        place = f'<svg x="{at(mean)}" y="11" overflow="visible">{mark_of(line)}</svg>'
        strip = f'<svg class="strip" aria-hidden="true">{"".join(parts)}{place}</svg>'
        out[name] = Cell(f"{mean:.1f}", "", f"{mean - top:+.1f}" if name != highest and not table.unlike else "", strip)
    return out


def mark_of(line: MethodLine | None) -> str:
    if line is None:
        return ""
    kind = "mark hollow" if hollow(line.number) else "mark"
    return element("path", d=marker(line.number, line.frozen, 0, 0), cls=kind)


def row_of(
    line: MethodLine,
    value: dict[str, Value],
    table: Table,
    found: Sequence[Verdict],
    goals: Sequence[str],
    strips: dict[str, dict[str, Cell]],
) -> Row:
    cells = []
    for measure in goals:
        known = value.get(measure)
        plain = Cell(f"{known:.1f}" if isinstance(known, int | float) else "–", "", "", "")
        cell = strips[measure].get(line.label, plain)
        state = next(
            (
                BEST_STATE if v.best else LEVEL_STATE
                for v in found
                if v.measure == measure and line.label in ([v.highest] if v.best else v.level)
            ),
            "",
        )
        cells.append(cell._replace(state=state, gap="" if state else cell.gap))
    look = colour(line.number, line.frozen)
    return Row(
        line.number,
        line.label,
        family_of(line.records[0]),
        look,
        mark_of(line),
        cells,
        cost(value, "mb"),
        cost(value, "rounds"),
    )
