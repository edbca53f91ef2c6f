"""docs/claims.md: of each paper a table of the claims that were measured, and a list of those that were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from claim_record import FIGURES
from rows import markdown

from fedvlm.report.gains import quantile

if TYPE_CHECKING:
    from claims import Claim

VERDICTS = ("holds", "does not hold", "not decided", "not tested")
HEAD = ["claim", "verdict", "ours: both sides, difference and 95 % interval", "of interest"]
HEAD += ["paper: left and right", "mechanism, last round", "measured"]
PROTOCOL = """\
Backbone {backbones}, split {splits} %, test split, last round, differences over five seeds unless another number stands. The
lr of every method comes from one grid on validation images of the first seed: the recipe's × 0.3, 1 and 3, and further where
the best was the first or last; where a claim names `lr`, that one holds for both sides. A verdict is about these sizes, not
about the paper's backbone.

- *holds* and *does not hold* follow from the 95 % interval and the smallest effect of interest, fixed before a comparison is
  run. A difference that is surely smaller than of interest does not hold. *not decided*: the interval says neither; *found*
  is the difference that these seeds find with a power of 80 %.
- Both verdicts need a mechanism that was seen to act; where it missed its threshold, a claim is *not tested*.
- A claim's source in the paper, its keys and the reasons for them stand in benchmarks/claims/PAPER.yaml, the lr that was
  chosen and the commit in measured.json beside it. Figures of before 2026-11-19 were measured with `bound=5`: longer updates
  were cut to five medians.
- G, P and C: [measures](compare.md#how-to-read-a-table); cacc: accuracy on corrupted images.

`--list` prints all claims and the data that each needs. To measure one again (the figures of the others stay):
"""


def document(found: Sequence[Claim], backbones: Sequence[str], splits: Sequence[str]) -> str:
    papers = list(dict.fromkeys(c.paper for c in found))
    protocol = PROTOCOL.format(backbones=", ".join(backbones), splits=", ".join(splits))
    text = [
        "# The papers' claims, checked\n",
        "Written by `python benchmarks/claims.py --write` from benchmarks/claims/measured.json; not edited by hand.\n",
        markdown(["paper", "claims", *VERDICTS], [*(counted(p, found) for p in papers), counted("", found)]) + "\n",
        protocol,
        "```\npython benchmarks/claims.py --data NAME=FOLDER --papers PAPER --only ID --write\n```",
    ]
    for paper in papers:
        mine = [c for c in found if c.paper == paper]
        text.append(f"\n## {paper}")
        if table := list(lines([c for c in mine if c.outcomes])):
            text += ["", markdown(HEAD, table)]
        text += [f"\n{note}" for c in mine if (note := note_of(c))]
        text += [f"\nNot tested ({why}): {', '.join(ids)}." for why, ids in without_figures(mine).items()]
    return "\n".join(text) + "\n"


def without_figures(found: Sequence[Claim]) -> dict[str, list[str]]:
    """Claims that nothing was measured of, by the reason."""
    reasons: dict[str, list[str]] = {}
    for claim in found:
        if not claim.outcomes:
            reasons.setdefault(claim.why, []).append(claim.content["id"])
    return reasons


def counted(paper: str, found: Sequence[Claim]) -> list[str]:
    """A row of the summary; "" is all papers."""
    counts = Counter(c.verdict for c in found if paper in ("", c.paper))
    return [f"[{paper}](#{paper})" if paper else "all", str(counts.total()), *(str(counts[v]) for v in VERDICTS)]


def lines(found: Sequence[Claim]) -> Iterator[list[str]]:
    for claim in found:
        row = [
            f"`{claim.content['id']}` {claim.content['claim']}",
            f"**{claim.verdict}**" + (f" ({claim.why})" if claim.why else ""),
            compared(claim),
            of_interest(claim),
            numbers_of_paper(claim.content.get("paper")),
            claim.effects,
            f"{claim.content['data']}, {claim.measured}" if claim.measured else claim.content["data"],
        ]
        yield [cell.replace("|", "\\|") for cell in row]


def compared(claim: Claim) -> str:
    """What was measured of both sides, each with its name; a left side that several comparisons share stands once."""
    told, before = list[str](), ""
    for one, found in zip(claim.compared, claim.outcomes, strict=False):
        left = f"{by(one)}: {side(one['left'])} {number(found.left)}; against "
        right = f"{side(one['right'])} {number(found.right)}: {found.difference:+.3g} ± {found.half:.2g}"
        told.append(right if left == before else left + right)
        before = left
    return "; ".join(told) or "–"


def of_interest(claim: Claim) -> str:
    """The smallest effects of interest; where nothing is decided, what these seeds find in four of five cases."""
    interest = ", ".join(dict.fromkeys(map(number, claim.margins)))
    if claim.verdict != "not decided" or claim.seeds < 2:
        return interest
    power = 1 + quantile(claim.seeds - 1, 0.4) / quantile(claim.seeds - 1)
    return f"{interest}; found: {', '.join(f'{one.half * power:.2g}' for one in claim.outcomes)}"


def side(given: Mapping[str, Any]) -> str:
    if "value" in given:
        return str(given["value"])
    settings = ({"on": given["on"]} if "on" in given else {}) | given.get("settings", {})
    return f"`{' '.join(filter(None, [given['method'], words(settings, plain=True)]))}`"


def by(one: Mapping[str, Any]) -> str:
    times = f" (the left {one['times']} times)" if "times" in one else ""
    return str(one["measure"]) + times + (f" with {words(one['keys'])}" if one.get("keys") else "")


def words(keys: Mapping[str, Any], plain: bool = False) -> str:
    """key=value; of long lists how many there are."""
    found = " ".join(f"{k}={value(v)}" for k, v in keys.items())
    return found if plain or not found else f"`{found}`"


def value(given: object) -> str:
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, list):
        return ",".join(map(str, given)) if len(given) < 5 else f"({len(given)} of them)"
    return str(given)


def number(given: float) -> str:
    if 0 < abs(given) < 0.1:
        return f"{given:.2g}"
    return f"{given:.2f}" if abs(given) < 1000 else f"{given:,.0f}"


def as_printed(given: float) -> str:
    """As the paper prints it."""
    return f"{given:g}" if abs(given) < 1000 else f"{given:,.0f}"


def numbers_of_paper(given: object) -> str:
    """Left and right of each comparison; a left number that follows itself stands once."""
    pairs = given if isinstance(given, list) else [given]
    told, before = list[str](), None
    for pair in pairs:
        if isinstance(pair, dict) and {"left", "right"} <= pair.keys():
            right = as_printed(pair["right"])
            told.append(right if pair["left"] == before else f"{as_printed(pair['left'])} and {right}")
            before = pair["left"]
    return "; ".join(told) or "–"


def note_of(claim: Claim) -> str:
    """The claim's `note` with its figures in place of their names; none where something was not measured."""
    note = str(claim.content.get("note", ""))
    if not note or len(claim.outcomes) < len(claim.compared):
        return ""
    figures = {f"{k}{i}": number(getattr(o, k)) for i, o in enumerate(claim.outcomes, 1) for k in FIGURES}
    return note.format(**figures, **{name: f"{value:.2g}" for name, value in claim.seen if value is not None})
