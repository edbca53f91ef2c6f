"""What uploaded embeddings give away, found out as an honest-but-curious server would.

FedDTL's clients send embeddings of their training images (merge=text_server); its D.1 lists ways to send less and measures
what they cost, not what they gain. The server has every shared parameter, so it sees an image just as a client does. Here
it is handed candidates: a client's training images, and as many that nobody trains on, the client's own first. Of what each
client would send in the last round, made with the final model (means over clients):

    matched   the share whose nearest candidate, by cosine, is the image (or one of the group) it was made of
    member    AUROC of a candidate's largest cosine to what was sent, training images against the others; ½ is a guess
    labels    the share whose nearest class embedding is that of its class
    classes   F1 of the set of classes found that way, against those the client holds

The last two look at embeddings alone; labels are sent beside them, so this server knows the classes without an attack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm import train
from fedvlm.core import Data, FedvlmError, Params, lift
from fedvlm.data.federation import Pool
from fedvlm.evaluate.detection import auroc
from fedvlm.evaluate.protocols import MEASURES, opened
from fedvlm.local.copies import adapters
from fedvlm.merge.text_server import TextServer
from fedvlm.method import Method
from fedvlm.report.tables import METRICS, Table, plus_minus, short
from fedvlm.runs import Run
from fedvlm.seeds import numpy_generator
from fedvlm.use import private_row, setup_of

PLAIN = {"upload": 1.0, "groups": 0, "blur": 0.0}
PROTECTIONS: tuple[dict[str, float], ...] = ({}, {"blur": 0.1}, {"groups": 4}, {"groups": 8}, {"upload": 0.2})
UTILITY = (*MEASURES, *METRICS[:2])
BLOCK = 1024  # uploads compared at a time


class Leak(NamedTuple):
    matched: float
    chance: float  # what `matched` is for a guess
    member: float | None
    classes: float
    labels: float
    sent: float  # embeddings a client


def attack(run: Run, pool: Pool | None = None, what_if: bool = False) -> list[dict[str, Any]]:
    """A row for the protection the run was run with, and its utility; with `what_if` one for each other, without."""
    info, setup = run.info, setup_of(run.info)
    if not isinstance(setup.merge, TextServer):
        raise FedvlmError(f"{run.folder.name}: {why_not(setup.merge.reveals)}")
    saved = run.load()
    if "result" not in info or saved is None:
        raise FedvlmError(f"{run.folder.name} is not finished; `fedvlm resume {run.folder}` first")
    pool = pool or train.load_pool(setup)
    if (pool.fingerprint, pool.backbone) != (info["data"]["fingerprint"], info["backbone"]["name"]):
        raise FedvlmError(f"{run.folder.name}: data={setup.config.data} or the backbone is not what it was trained on")
    (state, round), (method, federation) = saved, train.prepare(setup, pool)
    method, shared = method.told(state.shared)
    data, names, own = replace(federation.data, round=round), list(federation.names), setup.merge
    tried = [replace(own, **(PLAIN | p)) for p in PROTECTIONS] if what_if else []  # type: ignore[arg-type]
    merges = [own, *(m for m in tried if m != own)]
    server, leaks = lift(shared) | adapters(lift(state.private)), []
    for i in federation.seen:
        row = private_row(run, method, names, names[i], round) if method.adapter.private else {}
        leaks.append(one_client(method, merges, server, server | adapters(row), data, int(i)))
    rows = []
    for merge, found in zip(merges, zip(*leaks, strict=True), strict=True):
        last = info["result"]["last"] if merge is own else {}
        useful = {m: last.get(m) for m in (MEASURES if opened(info) else METRICS[:2])}
        name = run.folder.name + ("" if merge is own else ", what if")
        rows.append({"run": name} | {k: getattr(merge, k) for k in PLAIN} | useful | mean(found)._asdict())
    return rows


def why_not(reveals: str) -> str:
    if reveals:
        return f"its clients send {reveals}; only embeddings as merge=text_server sends them can be attacked here"
    return "its clients send parameters and numbers, no embeddings, so there is nothing to match; try a run of feddtl"


@torch.no_grad()
def one_client(
    method: Method, merges: list[TextServer], server: Params, client: Params, data: Data, i: int
) -> list[Leak]:
    """By merge. `client` is the model it sends embeddings of, `server` the one that candidates are seen with."""
    low, high = (int(b) for b in data.bounds[i, :2])
    rows = torch.from_numpy(np.concatenate([np.arange(low, high), others(data, i)]))
    candidates = seen(method, server, data.x[rows])
    z = seen(method, client, data.x[low:high]) if method.adapter.private else candidates[: high - low]
    y, text = data.y[low:high], method.adapter.classes(method.task, server)[0]
    found = []
    for merge in merges:
        sent, _ = merge.lessen(z, y, data, i)
        found.append(leak(sent, merge.made_of(y, data, i), candidates, y, text))
    return found


def others(data: Data, i: int) -> np.ndarray:
    """Rows that nobody trains on, as many as client i trains on: its own first, then anybody's."""
    draw, size = numpy_generator(data.seed, 79, i), int(data.counts("train")[i])
    own = np.arange(data.bounds[i, 1], data.bounds[i, 3])
    rest = [np.arange(b[1], b[3]) for k, b in enumerate(data.bounds) if k != i]
    return np.concatenate([draw.permutation(own), draw.permutation(np.concatenate([own[:0], *rest]))])[:size]


def seen(method: Method, params: Params, x: Tensor) -> Tensor:
    return torch.cat([method.adapter.features(method.task, params, p[None])[0] for p in x.split(method.adapter.block)])


def leak(sent: Tensor, made: list[Tensor], candidates: Tensor, y: Tensor, text: Tensor) -> Leak:
    """Of one client: `made` says which of its images each embedding came from, the first candidates; `y` their classes."""
    sent, candidates = F.normalize(sent, dim=-1), F.normalize(candidates, dim=-1)
    nearest, largest = [], torch.full((len(candidates),), -1.0, dtype=sent.dtype)
    for part in sent.split(BLOCK):
        cosines = part @ candidates.T
        nearest.append(cosines.argmax(1))
        largest = torch.maximum(largest, cosines.amax(0))
    hits = [bool((rows == k).any()) for rows, k in zip(made, torch.cat(nearest), strict=True)]
    told, real = (sent @ text.T).argmax(1), torch.stack([y[rows[0]] for rows in made])
    found, held = set(told.tolist()), set(y.tolist())
    return Leak(
        matched=float(np.mean(hits)),
        chance=float(np.mean([len(rows) for rows in made])) / len(candidates),
        member=auroc(largest[: len(y)], largest[len(y) :]),
        classes=2 * len(found & held) / (len(found) + len(held)),
        labels=float((told == real).double().mean()),
        sent=float(len(sent)),
    )


def mean(leaks: tuple[Leak, ...]) -> Leak:
    """Over clients, each counted once."""
    known = ([v for v in values if v is not None] for values in zip(*leaks, strict=True))
    return Leak(*(float(np.mean(v)) if v else None for v in known))  # type: ignore[arg-type]


def table(rows: list[dict[str, Any]]) -> Table:
    """Utility against leakage, in percent."""
    useful = [m for m in UTILITY if any(r.get(m) is not None for r in rows)]
    leaked = ["matched", "chance", "member", "classes", "labels"]
    shown = []
    for row in rows:
        numbers = {k: None if row.get(k) is None else 100 * row[k] for k in (*useful, *leaked)}
        cells = {k: plus_minus(v, None) for k, v in numbers.items()} | {k: short(row[k]) for k in PLAIN}
        shown.append(cells | {"run": row["run"], "sent": short(row["sent"])})
    notes = [
        "The server looks for each embedding it was sent among a client's training images and as many others. matched: the "
        "nearest is the image, or one of the group, that it was made of (chance: for a guess); member: AUROC of telling "
        "training images from the others, 50 is a guess; classes: F1 of the classes a client holds, and labels: embeddings "
        "told to their class, both without looking at the labels that are sent too. All in %; sent: embeddings a client.",
        "One round is attacked; a client's share, groups and noise are the same in every round. A group of one image is "
        "that image.",
    ]
    return Table(["run", *PLAIN, *useful, *leaked, "sent"], shown, notes, rows)
