"""docs/claims.md: of each paper a table of its claims with verdicts, and below it how each of them was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from claim_record import FIGURES
from rows import markdown

from fedvlm.report.gains import quantile

if TYPE_CHECKING:
    from claims import Claim, Outcome

VERDICTS = ("holds", "does not hold", "not decided", "not tested")
HEAD = ["id", "claim", "verdict", "ours: left and right, difference and 95 % interval", "effect of interest, found"]
HEAD += ["paper: left and right", "mechanism, last round"]


def document(found: Sequence[Claim], backbones: Sequence[str], splits: Sequence[str]) -> str:
    papers = list(dict.fromkeys(c.paper for c in found))
    text = [
        "# The papers' claims, checked\n",
        "Written by `python benchmarks/claims.py --write` from benchmarks/claims/measured.json; not edited by hand.\n",
        markdown(["paper", "claims", *VERDICTS], [*(counted(p, found) for p in papers), counted("", found)]) + "\n",
        f"Backbone {', '.join(backbones)}, split {', '.join(splits)} %, test split, last round; lr of every method from one "
        "grid on validation (first seed): the recipe's × 0.3, 1 and 3, and where factors are named, more where the best was "
        "the first or last; where `lr` is among the keys, that one for all. A verdict is about these sizes, not about the "
        "paper's backbone. Each comparison has a smallest effect of interest, fixed before it is run (for all claims on "
        "2026-11-19; figures of before are judged by it, too); behind it stands what "
        "the seeds would have found with a power of 80 %. *holds* and *does not hold* are said by the 95 % interval over "
        "seeds and that effect (a difference that is surely smaller than of interest does not hold), and both need a "
        "mechanism that was seen to act; *not decided*: neither; *not tested* says why. Left and right are the two sides "
        "of a comparison, in its order.\n",
        "To measure a claim again, with its data (`--list` names them), and keep the figures of the others:\n",
        "```\npython benchmarks/claims.py --data NAME=FOLDER --papers PAPER --only ID --write\n```",
    ]
    for paper in papers:
        mine = [c for c in found if c.paper == paper]
        text += [f"\n## {paper}\n", markdown(HEAD, list(lines(mine)))]
        text += [f"\n{note}" for c in mine if (note := note_of(c))]
        text += [f"\n### How the claims of {paper} were checked\n", *map(check_of, mine)]
    return "\n".join(text) + "\n"


def counted(paper: str, found: Sequence[Claim]) -> list[str]:
    """A row of the summary; "" is all papers."""
    counts = Counter(c.verdict for c in found if paper in ("", c.paper))
    return [f"[{paper}](#{paper})" if paper else "all", str(counts.total()), *(str(counts[v]) for v in VERDICTS)]


def lines(found: Sequence[Claim]) -> Iterator[list[str]]:
    for claim in found:
        pairs = zip_longest(claim.margins, claim.outcomes)
        row = [
            claim.content["id"],
            str(claim.content["claim"]),
            f"**{claim.verdict}**" + (f" ({claim.why})" if claim.why else ""),
            "; ".join(map(str, claim.outcomes)) or "–",
            "; ".join(dict.fromkeys(of_interest(m, o, claim.seeds) for m, o in pairs)) or "–",
            numbers_of_paper(claim.content.get("paper")),
            claim.effects,
        ]
        yield [cell.replace("|", "\\|") for cell in row]


def of_interest(margin: float, found: Outcome | None, seeds: int) -> str:
    """The smallest effect of interest, and the difference that so many seeds find in four of five cases."""
    if found is None or seeds < 2:
        return number(margin)
    once = quantile(seeds - 1)
    return f"{number(margin)}, {found.half * (1 + quantile(seeds - 1, 0.4) / once):.2g}"


def check_of(claim: Claim) -> str:
    """Where the claim stands in the paper, what was compared under which keys, and when."""
    content = claim.content
    compared = "; ".join(dict.fromkeys(f"{side(c['left'])} and {side(c['right'])} by {by(c)}" for c in claim.compared))
    keys = words(content.get("keys", {}))
    told = [
        f"- **{content['id']}**: {content['source']}.",
        f"{compared}; on {content['data']}{' with ' + keys if keys else ''}.",
        str(content.get("how", "")),
        f"Measured {claim.measured}." if claim.measured else "",
    ]
    return " ".join(filter(None, told))


def side(given: Mapping[str, Any]) -> str:
    if "value" in given:
        return str(given["value"])
    settings = ({"on": given["on"]} if "on" in given else {}) | given.get("settings", {})
    return f"`{' '.join(filter(None, [given['method'], words(settings, plain=True)]))}`"


def by(one: Mapping[str, Any]) -> str:
    times = f", the left {one['times']} times," if "times" in one else ""
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
    pairs = given if isinstance(given, list) else [given]
    found = [
        f"{as_printed(p['left'])} and {as_printed(p['right'])}"
        for p in pairs
        if isinstance(p, dict) and {"left", "right"} <= p.keys()
    ]
    return "; ".join(found) or "–"


def note_of(claim: Claim) -> str:
    """The claim's `note` with its figures in place of their names; none where something was not measured."""
    note = str(claim.content.get("note", ""))
    if not note or len(claim.outcomes) < len(claim.compared):
        return ""
    figures = {f"{k}{i}": number(getattr(o, k)) for i, o in enumerate(claim.outcomes, 1) for k in FIGURES}
    return note.format(**figures, **{name: f"{value:.2g}" for name, value in claim.seen if value is not None})
