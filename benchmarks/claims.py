"""The claims of the five papers, checked at the sizes that mini-clip and our data allow: writes docs/claims.md.

    python benchmarks/claims.py --data pacs=../shared/data/pacs                 # all whose data are given
    python benchmarks/claims.py --data pacs=../shared/data/pacs --papers fedot --seeds 50 77 98 11 12 --jobs 2 --write
    python benchmarks/claims.py --list
    python benchmarks/claims.py --read --write                                  # the document from the record alone

A claim is an entry of benchmarks/claims/PAPER.yaml: what is compared, with which keys, and which recorded effect shows that
the mechanism acted. Every method of a comparison gets its lr from one grid (its recipe's times 0.3, 1, 3; where the best is
the first or last of them, the next is tried, too, down to 0.003 and up to 30), by the same criterion: on validation, in the
first seed, what the measure reports (P and what is scored by personal models: the personal model; G and others: the shared
one; C: their mean). Then all seeds are run with it. The 95 % interval is Student's t over the differences by seed.

Each comparison has a smallest effect of interest, fixed before it is run (`margin`, else INTEREST; where the paper's own
difference is smaller, that one). Verdicts, by the interval [low, high] of left − right and that effect δ:

    >   holds: low > 0 and high ≥ δ     does not hold: high < δ      (< with the signs turned)
    >=  holds: low ≥ −δ                 does not hold: high < −δ
    ~   holds: −δ ≤ low, high ≤ δ       does not hold: low > δ or high < −δ

and "not decided" otherwise; the document says which difference the seeds would have found with a power of 80 %. "not
tested" takes the place of all three where the mechanism missed its threshold, where data are missing, where a method failed,
or where one that must have learned for a comparison to mean anything (`needs`) did not. Both sides of a comparison mean the
same: what they do not share is named in `settings` of a side, or belongs to the method in the paper (papers/protocol.py; a
test). Updates are not cut short (bound=0). Runs are kept in --out, and those that are there are not repeated. --write puts
what was measured into benchmarks/claims/measured.json, where the figures of other claims stay, and writes the document from
all of it.
"""

from __future__ import annotations

import argparse
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import claim_document
import numpy as np
import yaml
from claim_document import HEAD, VERDICTS, lines
from claim_record import FIGURES, Entry, digest, load, merged, save
from claim_runs import Side, Study, listed
from papers.measures import half_width
from study import last_rounds, megabytes_per_round, seed_scores

from fedvlm.core.records import RoundRecord, value_of
from fedvlm.system import console
from fedvlm.training.folder import RunFolder

FOLDER = Path(__file__).parent / "claims"
RECORD = FOLDER / "measured.json"
DOCUMENT = Path(__file__).parent.parent / "docs" / "claims.md"
PAPERS = ("fedclip", "premise", "fedot", "fft-gp", "feddtl", "focoop")  # premise: see its file
SEEDS = (50, 77, 98, 11, 12)
PERCENT = ("G", "P", "C", "acc", "cacc", "auroc", "fpr95", "local", "base", "novel", "hm")
HOLDS, FAILS, OPEN, UNTESTED = VERDICTS
INTEREST = {  # smallest effect of interest by measure, in its unit; of others a point
    "auroc": 2.0,
    "fpr95": 3.0,
    "cosine": 0.02,
    "condition": 0.05,
    "gap_variance": 1e-4,
    "mean_spread": 1e-4,
    "curvature": 0.02,
    "variance": 5e-4,
    "worst": 0.01,
    "mb": 0.1,
}


class Outcome(NamedTuple):
    left: float
    right: float
    difference: float
    half: float  # half of the 95 % interval


@dataclass
class Claim:
    paper: str
    content: Mapping[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    seen: list[tuple[str, float | None]] = field(default_factory=list)  # what the mechanism's records show
    acted: bool = False
    lacking: str = ""  # what must have learned, and did not
    reason: str = "not run"  # why it is not tested, or not all of it was run
    measured: str = ""  # when, and how it differs from the rule
    seeds: int = 0

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.content['id']}"

    @property
    def compared(self) -> list[Mapping[str, Any]]:
        found = self.content["compare"]
        return found if isinstance(found, list) else [found]

    def sides(self, one: Mapping[str, Any]) -> tuple[Side, ...]:
        """Left and right; a right that is a `value` has no runs."""
        keys = {**self.content.get("keys", {}), **one.get("keys", {})}
        given = [one[s] for s in ("left", "right") if "value" not in one[s]]
        return tuple(Side.of(side, self.content["data"], keys, one["measure"]) for side in given)

    @property
    def verdict(self) -> str:
        """Of all comparisons; nothing was tested where the mechanism was not seen to act."""
        if len(self.outcomes) < len(self.compared) or self.lacking or not self.acted:
            return UNTESTED
        found = {
            verdict_of(one["relation"], o.difference, o.half, margin)
            for one, o, margin in zip(self.compared, self.outcomes, self.margins, strict=True)
        }
        return HOLDS if found == {HOLDS} else FAILS if FAILS in found else OPEN

    @property
    def margins(self) -> list[float]:
        """The smallest effect of interest of each comparison."""
        printed = self.content.get("paper") or {}
        pairs = printed if isinstance(printed, list) else [printed] * len(self.compared)
        pairs = [*pairs, *[{}] * (len(self.compared) - len(pairs))]  # not of all comparisons the paper has numbers
        return [interest(one, pair) for one, pair in zip(self.compared, pairs, strict=True)]

    @property
    def why(self) -> str:
        if self.verdict != UNTESTED:
            return ""
        if len(self.outcomes) < len(self.compared):
            return self.reason
        return f"{self.lacking} did not learn" if self.lacking else f"the mechanism did not act: {self.missed}"

    @property
    def missed(self) -> str:
        """What the mechanism's records show where they miss their threshold."""
        asked = zip(self.content.get("mechanism", []), self.seen, strict=False)
        return ", ".join(
            f"{name} {'not recorded' if value is None else f'{value:.3g}'}, not {one['relation']} {one['value']:g}"
            for one, (name, value) in asked
            if not fitting(one, value)
        )

    @property
    def effects(self) -> str:
        """What the records show, with the method's name where several are looked at."""
        asked = [*self.content.get("mechanism", []), *self.content.get("needs", [])]
        several = len({one.get("method") for one in asked}) > 1
        texts = []
        for one, (name, value) in zip(asked, self.seen, strict=False):
            whose = f"{one['method']}: " if several else ""
            texts.append(f"{whose}{name} {'not recorded' if value is None else f'{value:.3g}'}")
        return ", ".join(dict.fromkeys(texts)) or "–"

    def recall(self, entry: Entry) -> None:
        """Takes the figures of the record."""
        if entry.definition != digest(self.content):
            self.reason = f"measured on {entry.date}, before the claim's definition was changed"
            return
        self.outcomes = [Outcome(**one) for one in entry.outcomes]
        self.seen, self.acted, self.reason = list(entry.seen), entry.acted, entry.reason or self.reason
        self.lacking, self.seeds = entry.lacking, len(entry.seeds)
        cut = f", at most {entry.rounds} rounds" if entry.rounds else ""
        seeds = "" if len(entry.seeds) == len(SEEDS) else f", {len(entry.seeds)} seeds"
        self.measured = f"{entry.date}{seeds}{cut}"


def claims(papers: Sequence[str], only: Sequence[str]) -> list[Claim]:
    found = [Claim(p, c) for p in papers for c in yaml.safe_load((FOLDER / f"{p}.yaml").read_text(encoding="utf-8"))]
    return [c for c in found if not only or c.content["id"] in only]


def values(runs: Sequence[RunFolder], measure: str) -> dict[int, float]:
    """The measure by seed."""
    name, _, held = measure.partition("@")
    if held:
        runs = [r for r in runs if held in r.record.finished.unseen or held in r.record.config.get("unseen", [])]  # type: ignore[operator]
    if name in ("G", "P", "C", "local", "base", "novel", "hm"):
        return {s: 100 * v for s, v in seed_scores(runs, name).items() if v is not None}
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        by_seed.setdefault(run.record.seed, []).append(of_run(run, name))
    return {s: float(np.mean(v)) for s, v in by_seed.items() if not any(map(math.isnan, v))}


def of_run(run: RunFolder, name: str) -> float:
    record, last = run.record, run.record.finished.last
    if name == "mb":
        return megabytes_per_round([run])
    if name == "parameters":
        asked, played = max(1, last.get("asked", 1)), max(1, last["round"])
        return record.finished.bytes_up / asked / played / 4
    rounds = [v for r in run.rounds() if (v := value_of(r, name)) is not None]
    if name == "cosine":
        return float(np.mean(rounds)) if rounds else math.nan
    if name in ("gap_variance", "mean_spread", "ga_spread", "faa_spread", "curvature"):
        return float(np.mean(rounds[len(rounds) // 2 :])) if rounds else math.nan
    by_client = last.get(name)
    if isinstance(by_client, dict):
        return float(np.mean(list(by_client.values())))
    found = value_of(last, name)
    return math.nan if found is None else found * (100 if name in PERCENT else 1)


def outcome(left: dict[int, float], right: dict[int, float]) -> Outcome | None:
    seeds = sorted(left.keys() & right.keys())
    if len(seeds) < 2:
        return None
    differences = np.array([left[s] - right[s] for s in seeds])
    mean, half = float(differences.mean()), half_width(list(differences)) or 0.0
    a, b = (float(np.mean([side[s] for s in seeds])) for side in (left, right))
    return Outcome(a, b, mean, half)


def interest(one: Mapping[str, Any], printed: Mapping[str, Any]) -> float:
    """The smallest effect of interest of a comparison."""
    if "margin" in one:
        return float(one["margin"])
    usual = INTEREST.get(one["measure"].partition("@")[0], 1.0)
    paper = abs(printed["left"] - printed["right"]) if {"left", "right"} <= printed.keys() else usual
    comparable = (
        one["relation"] in "<>" and paper > 0 and one["measure"] not in ("mb", "parameters", "variance", "worst")
    )
    return min(usual, paper) if comparable else usual


def verdict_of(relation: str, mean: float, half: float, margin: float) -> str:
    """By the interval mean ± half of left − right and the smallest effect of interest."""
    low, high = (-mean - half, -mean + half) if relation == "<" else (mean - half, mean + half)
    if relation in ("<", ">"):
        return FAILS if high < margin else HOLDS if low > 0 else OPEN
    if relation == ">=":
        return HOLDS if low >= -margin else FAILS if high < -margin else OPEN
    if relation == "~":
        return HOLDS if -margin <= low and high <= margin else FAILS if low > margin or high < -margin else OPEN
    raise ValueError(relation)


def mechanism(claim: Claim, study: Study) -> bool:
    """Whether everything that must be seen to act was; `seen` has the values."""
    fits = []
    for one in claim.content.get("mechanism", []):
        name, value = shown(one, claim, study)
        fits.append(fitting(one, value))
        claim.seen.append((name, value))
    return all(fits)


def untrained(claim: Claim, study: Study) -> str:
    """The first of `needs` that is not met; "" where all are."""
    for one in claim.content.get("needs", []):
        name, value = shown(one, claim, study)
        claim.seen.append((name, value))
        if not fitting(one, value):
            return f"{one['method']} on={one['on']}" if "on" in one else str(one["method"])
    return ""


def shown(one: Mapping[str, Any], claim: Claim, study: Study) -> tuple[str, float | None]:
    """Name and recorded value of what must have acted: of the sides with that method (and `on`, and `settings`)."""
    name = str(one.get("effect") or one.get("diagnostic") or one["field"])
    wanted = ({"on": one["on"]} if "on" in one else {}) | one.get("settings", {})

    def meant(side: Side) -> bool:
        keys = dict(side.keys)
        return side.method == one["method"] and all(keys.get(k) == listed(v) for k, v in wanted.items())

    used = {s for c in claim.compared for s in claim.sides(c)}
    runs = [r for side in used if meant(side) for r in study.runs.get(side, [])]
    return name, recorded(runs or [r for side, found in study.runs.items() if meant(side) for r in found], name)


def fitting(one: Mapping[str, Any], value: float | None) -> bool:
    return value is not None and (value > one["value"] if one["relation"] == ">" else value < one["value"])


def recorded(runs: Sequence[RunFolder], name: str) -> float | None:
    found = []
    for run, last in zip(runs, last_rounds(runs), strict=True):
        entry: object = last.get("effects", {}).get(name, last.get(name))
        if name == "untrained":
            entry = accuracy(next(iter(run.rounds())), "shared", "val")
        elif name == "learned":
            entry = accuracy(last, "shared", "val") - accuracy(next(iter(run.rounds())), "shared", "val")
        elif name == "fitted":
            entry = accuracy(last, "personal", "train") - accuracy(last, "shared", "train")
        if isinstance(entry, dict):
            found += list(entry.values())
        elif isinstance(entry, int | float) and not math.isnan(entry):
            found.append(float(entry))
    return float(np.median(found)) if found else None


def accuracy(record: RoundRecord, view: str, split: str) -> float:
    """NaN where it was not scored, as that on training images since 2026-11-19."""
    found = record.get(view, {}).get(split)  # type: ignore[attr-defined]
    return math.nan if found is None else float(found)


def check(claim: Claim, study: Study) -> None:
    for one in claim.compared:
        sides = claim.sides(one)
        lacking = [s for s in sides if s not in study.runs]
        if lacking:
            side = lacking[0]
            lacking_data = sorted(side.needed - study.data.keys())
            missing = f"{lacking_data[0]} was not given" if lacking_data else f"{side.method} was not run"
            claim.reason = study.failed.get(side, missing)
            return
        left, *right = (
            values(study.runs[s], one[name].get("measure", one["measure"]))
            for s, name in zip(sides, ("left", "right"), strict=False)
        )
        against = right[0] if right else dict.fromkeys(left, float(one["right"].get("value", 0)))
        found = outcome({seed: one.get("times", 1) * value for seed, value in left.items()}, against)
        if found is None:
            claim.reason = f"{one['measure']} was not recorded by both"
            return
        claim.outcomes.append(found)
    claim.acted, claim.reason = mechanism(claim, study), ""
    claim.lacking = untrained(claim, study)


def measured(claim: Claim, study: Study) -> Entry:
    args, sides = study.args, [s for one in claim.compared for s in claim.sides(one)]
    records = [run.record for side in sides for run in study.runs.get(side, [])]
    splits = {" / ".join(f"{x:g}" for x in r.config["split"]) for r in records}  # type: ignore[union-attr]
    longest = max(int(str(dict(side.keys).get("rounds", 0))) for side in sides)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return Entry(
        definition=digest(claim.content),
        date=str(date.today()),
        commit=commit,
        seeds=tuple(args.seeds),
        rounds=args.rounds if args.rounds and longest > args.rounds else 0,
        backbone=", ".join(sorted({r.backbone.name for r in records})),
        split=", ".join(sorted(splits)),
        outcomes=tuple({k: getattr(o, k) for k in FIGURES} for o in claim.outcomes),
        bound=max((float(str(r.config["bound"])) for r in records), default=0.0),
        seen=tuple(claim.seen),
        acted=claim.acted,
        reason=claim.reason,
        lacking=claim.lacking,
        factors=", ".join(dict.fromkeys(study.told(s) for s in sides if study.tuned(s) or s.choices)),
    )


def document(entries: Mapping[str, Entry]) -> str:
    """All claims, with what the record has of them."""
    found = claims(PAPERS, [])
    for claim in found:
        if claim.name in entries:
            claim.recall(entries[claim.name])
    backbones, splits = (sorted({getattr(e, k) for e in entries.values()}) for k in ("backbone", "split"))
    return claim_document.document(found, backbones, splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--papers", nargs="*", default=PAPERS, choices=PAPERS)
    parser.add_argument("--only", nargs="*", default=[], help="ids of claims")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=0, help="at most so many; 0: as the claims say")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: one per core")
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument(
        "--add", nargs="*", type=Path, default=[], help="runs nothing: records of other machines to take in"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--read", action="store_true", help="run nothing: judge what --out has")
    parser.add_argument("--write", action="store_true", help="the record and docs/claims.md")
    args = parser.parse_args()
    found = claims(args.papers, args.only)
    if args.list:
        return console.rows(
            ["paper", "id", "data", "claim"],
            [[c.paper, c.content["id"], c.content["data"], c.content["claim"]] for c in found],
        )
    if args.add:
        return publish(merged(load(RECORD), current({name: e for path in args.add for name, e in load(path).items()})))
    study = Study(args)
    study.play([side for c in found for one in c.compared for side in c.sides(one)])
    for claim in found:
        check(claim, study)
    console.rows(HEAD, list(lines(found)))
    if args.write:
        now = {c.name: measured(c, study) for c in found if c.outcomes}
        entries = merged(load(RECORD), now)
        for name in (n for n in now if entries[n] is not now[n]):
            console.note(f"{name}: the record has more comparisons, seeds or rounds, and is kept")
        publish(entries)


def current(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Those of claims as they are defined now."""
    known = {c.name: digest(c.content) for c in claims(PAPERS, [])}
    return {name: entry for name, entry in entries.items() if known.get(name) == entry.definition}


def publish(entries: Mapping[str, Entry]) -> None:
    """Write record and document."""
    save(RECORD, current(entries))
    DOCUMENT.write_text(document(current(entries)), encoding="utf-8")


if __name__ == "__main__":
    main()
