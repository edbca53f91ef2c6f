"""docs/premise.md and its figure, from the record of the claims: `python benchmarks/premise.py`.

From which accuracy of the frozen model on is a small adapter better than training all of CLIP? The claims of
claims/premise.yaml ask it for classes of three data sets on which zero-shot is right on 30 to 90 %.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import claims
from claim_record import load

from fedvlm.report.figures import COLOURS
from fedvlm.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart, shape_path

DOCS = Path(__file__).parents[1] / "docs"
SHAPES = {"pacs": ("circle", "c0"), "emoji": ("square", "c1"), "caltech101": ("up", "c2")}
STYLE = (
    "text{{font:11.5px sans-serif;fill:{muted}}}.middle{{text-anchor:middle}}.end{{text-anchor:end}}"
    ".grid{{stroke:{rule}}}"
)
TEXT = """# From which zero-shot accuracy on is an adapter enough?

Written by `python benchmarks/premise.py` from benchmarks/claims/measured.json; not edited by hand.

FedCLIP's paper finds that its adapter generalises better than training all of CLIP, and gives as the reason the wealth of
what CLIP knows: there, zero-shot is right on 94 to 96 %. Our backbone knows less, so that this premise is measured here, and
not assumed. For each row we chose classes, on validation images of seed 50, on which zero-shot is right on a given share,
and compared `fedclip` with `fedavg-clip`, which trains both towers, by the paper's measure.

**{answer}**

![Adapter minus all of CLIP, by zero-shot accuracy](premise.svg)

| data | zero-shot | `fedclip` | `fedavg-clip` | difference, 95 % interval | adapter better? |
| --- | --- | --- | --- | --- | --- |
{rows}

Protocol: mini-clip, {seeds} seeds, 10 rounds, 20 training images of each class and client, Adam for both, the lr of each
from one grid on validation images; pacs and emoji by G on all images of a held-out domain (leave-one-domain-out),
caltech101 by accuracy on the clients' own test images. Both learned in every row (*mechanism* in
[claims](claims.md#premise)). At least 1 point counts; *open*: the interval holds both signs or less than that.

What this does not say: nothing about a backbone that has seen hundreds of millions of images, nor about zero-shot above
90 %, which is where the paper stands, nor about fewer than 20 images a class. From the lowest to the highest zero-shot
accuracy the difference goes from and to: {slope}. That the adapter sends far fewer bytes is another
[claim](claims.md#fedclip), and holds.

Again, with the data: `python benchmarks/claims.py --papers premise --data pacs=FOLDER caltech101=FOLDER --write`, then this
page's command.
"""


class Point(NamedTuple):
    data: str
    zero_shot: int
    left: float
    right: float
    difference: float
    half: float
    seeds: int

    @property
    def verdict(self) -> str:
        if self.difference - self.half > 0:
            return "yes"
        return "no" if self.difference + self.half < 1 else "open"


def points() -> list[Point]:
    """The claims of premise.yaml that were measured."""
    record, found = load(claims.RECORD), []
    for claim in claims.claims(["premise"], []):
        entry = record.get(claim.name)
        share = re.search(r"on (\d+) %", str(claim.content["claim"]))
        if entry and entry.outcomes and share:
            one = entry.outcomes[0]
            figures = (float(one[k]) for k in ("left", "right", "difference", "half"))
            found.append(Point(str(claim.content["data"]), int(share[1]), *figures, len(entry.seeds)))
    return found


def drawing(found: list[Point]) -> str:
    lows, highs = [p.difference - p.half for p in found], [p.difference + p.half for p in found]
    c = chart("adapter minus all of CLIP", [20, 100], [*lows, *highs, 0, min(lows) - 2], "zero-shot accuracy, %")
    c.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=c.y(0), y2=c.y(0), stroke=COLOURS["muted"], stroke_dasharray="4 3")
    c.add("text", text="↑ fedclip better, points", x=LEFT + 4, y=TOP + 8)
    for p in found:
        shape, colour = SHAPES[p.data]
        x = c.x(p.zero_shot) + 5 * (list(SHAPES).index(p.data) - 1)  # beside each other
        c.add("line", x1=x, x2=x, y1=c.y(p.difference - p.half), y2=c.y(p.difference + p.half), stroke=COLOURS[colour])
        c.add("path", d=shape_path(shape, x, c.y(p.difference), 4.5), fill=COLOURS[colour])
    for k, (name, (shape, colour)) in enumerate(SHAPES.items()):
        x, y = LEFT + 8 + 90 * k, HEIGHT - BOTTOM - 10
        c.add("path", d=shape_path(shape, x, y, 4.5), fill=COLOURS[colour])
        c.add("text", text=name, x=x + 9, y=y + 4)
    head, _, rest = str(c).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE.format(**COLOURS)}</style>{rest}\n'


def page(found: list[Point]) -> str:
    rows = [
        f"| {p.data} | {p.zero_shot} % | {p.left:.1f} | {p.right:.1f} | {p.difference:+.1f} ± {p.half:.1f} | {p.verdict} |"
        for p in sorted(found, key=lambda p: (p.data, p.zero_shot))
    ]
    by_data: dict[str, list[Point]] = defaultdict(list)
    for p in sorted(found, key=lambda p: p.zero_shot):
        by_data[p.data].append(p)
    better = [p for p in found if p.verdict == "yes"]
    if better:
        answer = "The adapter was better in: " + ", ".join(f"{p.data} at {p.zero_shot} %" for p in better) + "."
    else:
        shares = [p.zero_shot for p in found]
        behind = sum(p.verdict == "no" for p in found)
        answer = f"Nowhere between {min(shares)} and {max(shares)} %: it is not better in {behind} of {len(found)} rows"
        answer += f"; open: {len(found) - behind}." if behind < len(found) else "."
    slope = "; ".join(f"{d}: {each[0].difference:+.1f} to {each[-1].difference:+.1f}" for d, each in by_data.items())
    seeds = " or ".join(map(str, sorted({p.seeds for p in found})))
    return TEXT.format(answer=answer, rows="\n".join(rows), seeds=seeds, slope=slope)


def main() -> None:
    found = points()
    (DOCS / "premise.md").write_text(page(found), encoding="utf-8")
    (DOCS / "premise.svg").write_text(drawing(found), encoding="utf-8")


if __name__ == "__main__":
    main()
