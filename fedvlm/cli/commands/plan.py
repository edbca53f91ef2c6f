"""What `fedvlm run … --dry` shows: clients, classes, bytes and time, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable

from fedvlm.config.config import Setup
from fedvlm.data.clients import Federation, partition_of, table
from fedvlm.data.pool import Pools
from fedvlm.data.sample import SampledPool, sampled_pool
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.system.formatting import counted, duration, size
from fedvlm.training import planning
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.privacy_plan import recorded

MOST_ROWS, MOST_CLASSES = 40, 12


def show_plan(setup: Setup) -> None:
    pools = Pools()
    planning.checked(setup, pools)
    found = sampled_pool(setup, pools.outline(setup))
    runs = planning.single_runs(setup, found.pool)
    first = PlannedRun(runs[0], found.pool)
    setup, method, federation = first.setup, first.method, first.federation
    show_clients(federation)
    kind = partition_of(setup.config, found.pool.source.items)
    chosen = " (chosen for this data)" if setup.config.partition == "auto" else ""
    console.out.print(
        f"partition={kind}{chosen}: {len(federation.names)} clients, {len(federation.task.classes)} classes"
    )
    show_encoding(found)
    if federation.task.novel:
        show_novel(first)
    cost = planning.estimate(first)
    total = cost.seconds * setup.config.rounds * len(runs)
    console.out.print(
        f"{counted(len(runs), 'run')} × {counted(setup.config.rounds, 'round')}; a round asks {cost.asked} clients: "
        f"{size(cost.down)} down, {size(cost.up)} up, about {duration(cost.seconds)} "
        f"({duration(total)} in all, one after the other)"
    )
    if method.privacy:
        line = recorded(method.privacy, setup.config.rounds).line
        console.out.print(
            f"noise multiplier {method.privacy.noise:g}, clip {method.privacy.clip:g}: {line}", markup=False
        )
    reveals = f" ({setup.merge.reveals})" if setup.merge.reveals else ""
    console.out.print(
        f"stays on each client: its images{f', {listed(method.newcomer)}' if method.newcomer else ''}; "
        f"is sent to the server: {', '.join(uploads(method))}{reveals}",
        markup=False,
    )


def show_submission(setup: Setup) -> None:
    """What `federation=` would start; nothing is sent. Data and classes are the sites' own and unknown here."""
    from fedvlm.federation.admin import planned

    plan = planned(setup)
    rows = [[site, "held out" if site in setup.config.unseen else "trains"] for site in plan.sites]
    console.rows(["site", "role"], rows)
    console.line(f"run {plan.name} of federation {plan.federation}: {counted(setup.config.rounds, 'round')}")
    if setup.merge.reveals:
        console.line(f"clients also send {setup.merge.reveals}, which each site's rules must allow (reveals:)")
    console.note("nothing was submitted; the sites' rules (site.yaml) decide when it is")


def show_encoding(found: SampledPool) -> None:
    sample = found.sample
    if sample is None:
        return
    seconds = sample.seconds * found.images * (1 - sample.stored)
    stored = f"; {100 * sample.stored:.0f} % are stored already" if sample.stored else ""
    console.out.print(
        f"encoding {found.images:,} images: about {duration(seconds)} ({sample.tried} were tried{stored})", markup=False
    )


def show_clients(federation: Federation) -> None:
    names = [c.replace("_", " ") for c in federation.task.classes]
    shown = names if len(names) <= MOST_CLASSES else []
    lines = []
    for row in table(federation)[:MOST_ROWS]:
        role = "held out" if row.unseen else "trains" if row.splits["train"] else "no data"
        counts = [str(n) for n in row.classes] if shown else [str(sum(n > 0 for n in row.classes))]
        lines.append([row.client, role, *(str(row.splits[s]) for s in ("train", "val", "test")), *counts])
    console.rows(["client", "role", "train", "val", "test", *(shown or ["classes"])], lines)
    if len(federation.names) > MOST_ROWS:
        console.note(f"… and {len(federation.names) - MOST_ROWS} more clients")


def show_novel(run: PlannedRun) -> None:
    able = "novel" in run.method.base_and_novel
    closed = "" if able else f", which adapter={run.setup.parts['adapter'].name} cannot be asked about"
    extras = run.federation.data.extras
    images = " and ".join(f"{len(extras[half].x)} of {half}" for half in ("base", "novel"))
    novel = run.federation.task.novel
    assert novel is not None
    console.out.print(f"nobody trains on {len(novel.classes)} novel classes{closed}; test images: {images} classes")


def uploads(method: Method) -> list[str]:
    """What a client sends in training, by name; common numbers in words."""
    words = {"n": "n (number of training images)", "loss": "loss (training loss)"}
    return [listed(method.initial) or "no parameters", *(words.get(name, name) for name in method.uploads)]


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are: a network has hundreds."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")
