"""The answer of a table in two sentences, and a line of evidence for each goal: for terminal, page and `choose`."""

from __future__ import annotations

from collections.abc import Sequence

from fedvlm.report.columns import DEFINED
from fedvlm.report.gains import ENOUGH, FROZEN, Gain, Verdict, above_frozen, compared_measures, verdicts
from fedvlm.system.formatting import counted
from fedvlm.system.table import Table

NUMBERS = {1: "One seed", 2: "Two seeds"}


def headline(table: Table) -> str:
    """The answer in at most two sentences, by the first rule that applies."""
    if table.unlike:
        return f"These rows were not run alike ({table.unlike[0]}); no winner is named."
    goals = compared_measures(table.by_seed)
    if len(table.by_seed) < 2:
        return alone(table, goals)
    found = verdicts(table)
    if not found:
        return "These rows have no measure in common; no winner is named."
    tail = "; new clients were not tested" if goals == ["P"] else ""
    if min(v.seeds for v in found) < ENOUGH:
        few = NUMBERS[min(v.seeds for v in found)]
        return f"{pointed(found, 'highest')}{tail}. {few} cannot tell whether that is chance."
    none = [text for v in found if (text := nothing_above(table, v.measure))]
    rest = [v for v in found if not nothing_above(table, v.measure)]
    if len(rest) == 2:
        return two_goals(rest, table) + tail + "."
    return ". ".join([*none, *(one_goal(v) for v in rest)]) + tail + "."


def alone(table: Table, goals: Sequence[str]) -> str:
    row = next(iter(table.by_seed), "")
    value = next((v for v in table.values if v["method"] == row), {})
    scores = ", ".join(f"{value[m]:.1f} % on {DEFINED[m].word}" for m in goals if value.get(m) is not None)
    return f"{row}: {scores}. Nothing to compare with." if scores else "Nothing to compare."


def nothing_above(table: Table, measure: str) -> str:
    """The sentence where no method is shown to be above the frozen model; "" where one is, or there is no frozen model."""
    found = above_frozen(table.by_seed, measure)
    if not found or any(yes for _, yes in found.values()):
        return ""
    name, (gained, _) = max(found.items(), key=lambda entry: entry[1][0].mean)
    return f"No method is above {FROZEN} for {DEFINED[measure].word} (highest: {name}, {gained})"


def pointed(found: Sequence[Verdict], word: str) -> str:
    """Who is best, or highest, for each goal: one clause where it is one row."""
    if len(found) == 2 and found[0].highest == found[1].highest:
        return f"{found[0].highest} is {word} for {both(found)}"
    first, *others = (f"{v.highest} is {word} for {DEFINED[v.measure].word}" for v in found)
    return ", ".join([first, *(text.replace(f" is {word}", "") for text in others)])


def both(found: Sequence[Verdict]) -> str:
    """new and own clients."""
    first, second = (DEFINED[v.measure].word for v in found)
    head, _, last = first.partition(" ")
    return f"{head} and {second}" if second.endswith(f" {last}") else f"{first} and {second}"


def one_goal(v: Verdict) -> str:
    goal = DEFINED[v.measure].word
    if v.best:
        return f"{v.highest} is best for {goal}"
    return f"{listed(v.level)} are level for {goal}"


def two_goals(found: Sequence[Verdict], table: Table) -> str:
    first, second = found
    if first.best and second.best:
        return pointed(found, "best")
    if not first.best and not second.best:
        if set(first.level) == set(second.level):
            return f"{listed(first.level)} are level for {both(found)}{cheapest(first.level, table)}"
        return f"{one_goal(first)}. {one_goal(second)}"
    best, other = (first, second) if first.best else (second, first)
    goal = DEFINED[other.measure].word
    if best.highest in other.level:
        with_whom = listed([name for name in other.level if name != best.highest])
        return f"{one_goal(best)}. For {goal} it is level with {with_whom}"
    return f"{one_goal(best)}. For {goal} {listed(other.level)} are level"


def cheapest(names: Sequence[str], table: Table) -> str:
    """Which of these rows needs the fewest rounds, or sends least, as a sentence; "" where none does."""
    for key, words in (("rounds", "needs the fewest rounds"), ("mb", "sends least")):
        spent = {str(row["method"]): row.get(key) for row in table.values if row["method"] in names}
        known = sorted((float(v), name) for name, v in spent.items() if isinstance(v, int | float))
        if len(known) == len(names) and known[0][0] < known[1][0]:
            return f". {known[0][1]} {words}"
    return ""


def listed(names: Sequence[str]) -> str:
    """a, b and c; of more than three the first two and how many others."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} others"
    return " and ".join(", ".join(names).rsplit(", ", 1))


def answers(table: Table) -> list[str]:
    """A line for each goal: the highest row's value, whether it is best, and by how much."""
    found = verdicts(table)
    width = max((len(DEFINED[v.measure].word) for v in found), default=0)
    return [f"{DEFINED[v.measure].word:{width}}  {evidence(v, table)}" for v in found]


def evidence(v: Verdict, table: Table) -> str:
    mean = table.by_seed[v.highest][v.measure]
    value = sum(mean.values()) / len(mean)
    state = "best" if v.best else "level" if v.level else "highest"
    return f"{value:.1f} %  {state:5}  {v.highest}{by_how_much(v.gain, v.rival)}{on_clients(v)}"


def by_how_much(gained: Gain | None, rival: str) -> str:
    if gained is None:
        return ""
    low, high = gained.interval
    sure = f" ({low:.1f} to {high:.1f})" if gained.seeds > 1 else ""
    return f", {abs(gained.mean):.1f} {'above' if gained.mean >= 0 else 'below'} {rival}{sure}"


def on_clients(v: Verdict) -> str:
    higher, known = v.clients
    return f", higher on {higher} of {counted(known, 'client')}" if known > 1 else ""
