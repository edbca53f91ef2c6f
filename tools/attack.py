"""What an honest-but-curious server learns about private images from the embeddings that clients send.

FedDTL's clients send embeddings of their training images (merge=text_server). The paper lists ways to send less (D.1) and
measures their cost in accuracy, not their gain in privacy. The server has all shared parameters, so it can embed an image
as a client does. The attack gives it candidate images: a client's training images and as many images that no client trains
on, the client's own first. For the embeddings that each client would send in the last round with the final model it
measures (means over clients):

    matched   share of embeddings whose nearest candidate by cosine is the image (or one of the group) it was made from
    member    membership inference: AUROC of a candidate's largest cosine to any embedding, training images against the
              others; ½ is chance
    labels    share of embeddings whose nearest class embedding is that of their class
    classes   F1 of the set of classes found in this way, against the classes that the client holds

The last two use the embeddings only. Labels are sent too, so this server knows the classes without an attack.

python tools/attack.py RUN … [--what-if] [--trust] [--csv FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm import api
from fedvlm.cli.commands.output import write_rows
from fedvlm.core.adapter import class_vectors
from fedvlm.core.copies import adapter_params
from fedvlm.core.data import Data
from fedvlm.core.detection import auroc
from fedvlm.core.records import MEASURES, RoundRecord, value_of
from fedvlm.core.seeds import numpy_generator
from fedvlm.core.state import Params, with_client_axis
from fedvlm.data.pool import Pool, Pools
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import is_base_to_novel
from fedvlm.parts.merge.text_server import TextServer
from fedvlm.predict.predictor import private_row
from fedvlm.report.tables import backbone_id, format_value, plus_minus
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.system.table import Table, Value
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.saved import check_state

Row = dict[str, Value]  # one row of the table: the run, the protection, utility and leakage as fractions


class Protection(NamedTuple):
    """Settings of TextServer that reduce what is sent; the defaults protect nothing."""

    upload_share: float = 1.0
    upload_groups: int = 0
    upload_noise: float = 0.0


PROTECTIONS = (
    Protection(),
    Protection(upload_noise=0.1),
    Protection(upload_groups=4),
    Protection(upload_groups=8),
    Protection(upload_share=0.2),
)
SCORES = ("G", "P")
UTILITY = (*MEASURES, *SCORES)
LEAKAGE = ("matched", "chance", "member", "classes", "labels")
BLOCK = 1024  # embeddings compared at a time


class Leak(NamedTuple):
    """What the attack finds; see the module's docstring."""

    matched: float
    chance: float  # `matched` of a random guess
    member: float | None  # None without other images to compare with
    classes: float
    labels: float
    sent: float  # embeddings per client


def attack(run: RunFolder, pool: Pool | None = None, what_if: bool = False) -> list[Row]:
    """A row with the utility and leakage of the run; with `what_if` also the leakage under each of PROTECTIONS, had it
    been used in the last round only."""
    record, setup = run.record, run.setup()
    if not isinstance(setup.merge, TextServer):
        raise FedvlmError(f"{run.folder.name}: {why_not(setup.merge.reveals)}")
    saved = run.load()
    if record.result is None or saved is None:
        raise FedvlmError(f"{run.folder.name} is not finished; `fedvlm resume {run.folder}` first")
    pool = pool or Pools().load(setup)
    if (pool.fingerprint, pool.backbone) != (record.data.fingerprint, backbone_id(record)):
        raise FedvlmError(f"{run.folder.name}: data={setup.config.data} or the backbone is not what it was trained on")
    state, round = saved
    planned = PlannedRun(setup, pool)
    method, federation = planned.method, planned.federation
    check_state(state, method, run.folder / "state.safetensors")
    method = method.for_message(state.message())
    data, names, own = replace(federation.data, round=round), list(federation.names), setup.merge
    alternatives = [replace(own, **p._asdict()) for p in PROTECTIONS] if what_if else []
    merges = [own, *(m for m in alternatives if m != own)]
    server = with_client_axis(state.shared) | adapter_params(with_client_axis(state.private))
    leaks = []
    for i in federation.seen:
        row = private_row(run, state, names[i], round) if method.adapter.private else {}
        leaks.append(attack_client(method, merges, server, server | adapter_params(row), data, int(i)))
    rows: list[Row] = []
    for merge, by_client in zip(merges, zip(*leaks, strict=True), strict=True):
        last: RoundRecord = record.result.last if merge is own else {}  # the utility of the alternatives is unknown
        name = run.folder.name + ("" if merge is own else ", what if")
        protection = {k: getattr(merge, k) for k in Protection._fields}
        utility = {m: value_of(last, m) for m in (MEASURES if is_base_to_novel(record) else SCORES)}
        rows.append({"run": name, **protection, **utility, **mean_leak(by_client)._asdict()})
    return rows


def why_not(reveals: str) -> str:
    """Why a run cannot be attacked, from what its clients send beside parameters ("": nothing)."""
    if reveals:
        return f"its clients send {reveals}; only embeddings as merge=text_server sends them can be attacked here"
    return "its clients send parameters and numbers, no embeddings, so there is nothing to match; try a run of feddtl"


@torch.no_grad()
def attack_client(
    method: Method, merges: list[TextServer], server: Params, client: Params, data: Data, i: int
) -> list[Leak]:
    """The leak of client i under each merge. `client` is the model that makes the embeddings it sends, `server` the one
    with which the server embeds candidates."""
    low, high = (int(b) for b in data.bounds[i, :2])
    rows = torch.from_numpy(np.concatenate([np.arange(low, high), non_members(data, i)]))
    candidates = embed(method, server, data.x[rows])
    z = embed(method, client, data.x[low:high]) if method.adapter.private else candidates[: high - low]
    y, text = data.y[low:high], class_vectors(method.adapter, method.task, server)[0]
    leaks = []
    for merge in merges:
        sent, _ = merge.embeddings_to_send(z, y, data, i)
        leaks.append(measure_leak(sent, merge.source_rows(y, data, i), candidates, y, text))
    return leaks


def non_members(data: Data, i: int) -> np.ndarray:
    """Rows that no client trains on, as many as client i trains on where there are enough: its own val and test rows
    first, then those of others."""
    draw, size = numpy_generator(data.seed, 79, i), int(data.counts("train")[i])
    own = np.arange(data.bounds[i, 1], data.bounds[i, 3])
    rest = [np.arange(b[1], b[3]) for k, b in enumerate(data.bounds) if k != i]
    return np.concatenate([draw.permutation(own), draw.permutation(np.concatenate([own[:0], *rest]))])[:size]


def embed(method: Method, params: Params, x: Tensor) -> Tensor:
    """The adapted embeddings [images, dim]."""
    blocks = torch.split(x, method.adapter.limits.examples)
    return torch.cat([method.adapter.features(method.task, params, block[None])[0] for block in blocks])


def measure_leak(sent: Tensor, made_of: list[Tensor], candidates: Tensor, y: Tensor, text: Tensor) -> Leak:
    """The leak of one client from the embeddings it sent.

    `made_of` lists, for each embedding, the indices of the client's images that it was made from; the client's images are
    the first candidates, with classes `y`. `text` are the class embeddings.
    """
    sent, candidates = F.normalize(sent, dim=-1), F.normalize(candidates, dim=-1)
    nearest, largest = [], torch.full((len(candidates),), -1.0, dtype=sent.dtype)
    for block in torch.split(sent, BLOCK):
        cosines = block @ candidates.T
        nearest.append(cosines.argmax(1))
        largest = torch.maximum(largest, cosines.amax(0))
    hits = [bool((rows == k).any()) for rows, k in zip(made_of, torch.cat(nearest), strict=True)]
    predicted, true = (sent @ text.T).argmax(1), torch.stack([y[rows[0]] for rows in made_of])
    found, held = set(predicted.tolist()), set(y.tolist())
    return Leak(
        matched=float(np.mean(hits)),
        chance=float(np.mean([len(rows) for rows in made_of])) / len(candidates),
        member=auroc(largest[: len(y)], largest[len(y) :]),
        classes=2 * len(found & held) / (len(found) + len(held)),
        labels=float((predicted == true).double().mean()),
        sent=float(len(sent)),
    )


def mean_leak(leaks: Sequence[Leak]) -> Leak:
    """Means over clients, unweighted; `member` over the clients that have it."""
    members = [x.member for x in leaks if x.member is not None]
    means = {k: float(np.mean([getattr(x, k) for x in leaks])) for k in Leak._fields if k != "member"}
    return Leak(**means, member=float(np.mean(members)) if members else None)


def table(rows: list[Row]) -> Table:
    """Utility against leakage, in percent."""
    utility = [m for m in UTILITY if any(r.get(m) is not None for r in rows)]
    shown = []
    for row in rows:
        cells = {k: plus_minus(percent(row.get(k)), None) for k in (*utility, *LEAKAGE)}
        cells |= {k: format_value(row[k]) for k in (*Protection._fields, "sent")}
        shown.append(cells | {"run": str(row["run"])})
    notes = [
        "The server compares each embedding with candidates: a client's training images and as many others. matched: the "
        "nearest is the image, or one of the group, that it was made from (chance: of a random guess); member: AUROC of "
        "telling training images from the others, 50 is a guess; classes: F1 of the classes that a client holds; labels: "
        "embeddings assigned to their class, both without the labels that are sent too. All in %; sent: embeddings per "
        "client.",
        "One round is attacked; a client's share, groups and noise are the same in every round. A group of one image is "
        "that image.",
    ]
    return Table(["run", *Protection._fields, *utility, *LEAKAGE, "sent"], shown, notes, list(rows))


def percent(value: float | str | None) -> float | None:
    return 100 * value if isinstance(value, float | int) else None


def show(args: argparse.Namespace) -> None:
    """Attack the runs whose clients send embeddings, and print the table."""
    found = api.runs(*args.runs, trust=args.trust).files
    silent = [r for r in found if not r.record.reveals]
    if len(silent) == len(found):
        raise FedvlmError(f"{found[0].folder.name}: {why_not('')}")
    for run in silent:
        console.note(f"{run.folder.name} is left out: {why_not('')}")
    pools = Pools()
    rows = []
    for run in (r for r in found if r not in silent):
        rows += attack(run, pools.encode(run.setup()), args.what_if)
    console.show(table(rows))
    if args.csv:
        columns = list(dict.fromkeys(k for row in rows for k in row))
        write_rows(args.csv, columns, [[row.get(c, "") for c in columns] for row in rows])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--what-if", action="store_true", help="also with other protections than the run's own")
    parser.add_argument("--trust", action="store_true", help="allow what folders from others would do, as in fedvlm")
    parser.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    try:
        show(parser.parse_args(words))
    except FedvlmError as error:
        print(f"attack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
