"""A table in a document, with the note below it: read back, so that rows of methods that were not run again can stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

WRITTEN, OF, EDGE, NOT_RUN = (
    "Written on ",
    "rows of ",
    "the best lr is the last that was tried, and another may be better: ",
    "not run: ",
)


@dataclass(frozen=True)
class Section:
    """The first cell of a line names its method, and what follows a comma there another measure of the same one."""

    head: list[str]
    lines: list[list[str]]
    date: str
    rule: str = ""  # what all rows have in common, in words
    at_edge: tuple[str, ...] = ()  # methods whose lr is the last that was tried
    missing: tuple[str, ...] = ()  # methods without a row
    older: dict[str, str] = field(default_factory=dict)  # the date of a method whose rows are of another day

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(method_of(line) for line in self.lines))

    def text(self) -> str:
        days = sorted(set(self.older.values()))
        about = [f"{OF}{day}: {', '.join(m for m in self.methods if self.older.get(m) == day)}" for day in days]
        about += [self.rule] if self.rule else []
        about += [EDGE + ", ".join(self.at_edge)] if self.at_edge else []
        about += [NOT_RUN + ", ".join(self.missing)] if self.missing else []
        return f"{markdown(self.head, self.lines)}\n\n{'; '.join([WRITTEN + self.date, *about])}.\n"


def method_of(line: Sequence[str]) -> str:
    return line[0].split(",")[0]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]
    return "\n".join(rows)


def read(text: str) -> Section | None:
    """What `Section.text` wrote; None where it is something else."""
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    note = next((line for line in text.splitlines() if line.startswith(WRITTEN)), "")
    if len(table) < 3 or not note:
        return None
    date, *about = note.removeprefix(WRITTEN).removesuffix(".").split("; ")
    found = Section(table[0], table[2:], date)
    for part in about:
        if part.startswith(OF):
            day, _, names = part.removeprefix(OF).partition(": ")
            found.older.update(dict.fromkeys(names.split(", "), day))
        elif part.startswith(EDGE):
            found = replace(found, at_edge=tuple(part.removeprefix(EDGE).split(", ")))
        elif part.startswith(NOT_RUN):
            found = replace(found, missing=tuple(part.removeprefix(NOT_RUN).split(", ")))
        else:
            found = replace(found, rule=part)
    return found


def joined(new: Section, old: Section | None, order: Sequence[str]) -> Section:
    """The new rows, and of methods that have none the old ones, where columns and rule are the same; in this order."""
    if old is None or (old.head, old.rule) != (new.head, new.rule):
        return new
    kept = [line for line in old.lines if method_of(line) not in new.methods and method_of(line) in order]
    stay = [m for m in order if m in map(method_of, kept)]
    lines = sorted([*new.lines, *kept], key=lambda line: order.index(method_of(line)))
    edge, older = {*new.at_edge, *(m for m in stay if m in old.at_edge)}, {m: old.older.get(m, old.date) for m in stay}
    return replace(
        new,
        lines=lines,
        at_edge=tuple(m for m in order if m in edge),
        missing=tuple(m for m in order if m not in map(method_of, lines)),
        older={m: day for m, day in older.items() if day != new.date},
    )
