"""What left the clients of a run, from the server's side of the ledger: by client and step."""

from __future__ import annotations

from collections import defaultdict

from fedvlm.federation.ledger import RECEIVED, Entry, entries
from fedvlm.training.folder import RunFolder

SHOWN = 6  # tensors that are named


def sent(run: RunFolder) -> list[dict[str, str]]:
    """A row for each client and step; [] where the run has no ledger (engines within one process)."""
    path = run.folder / RECEIVED
    if not path.exists():
        return []
    found: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries(path):
        found[entry.site, entry.step].append(entry)
    return [sent_row(run, site, step, lines) for (site, step), lines in sorted(found.items())]


def sent_row(run: RunFolder, site: str, step: str, lines: list[Entry]) -> dict[str, str]:
    named = {t.name: f"{t.name}[{'×'.join(map(str, t.shape))}]" for e in lines for t in e.tensors}
    more = len(named) - SHOWN
    marks = [mark for mark in ("clipped", "noised", "masked") if all(getattr(e, mark) for e in lines)]
    return {
        "run": run.folder.name,
        "client": site,
        "step": step,
        "messages": f"{len(lines):,}",
        "bytes": f"{sum(e.bytes for e in lines):,}",
        "what": " ".join(list(named.values())[:SHOWN]) + (f" and {more} more" if more > 0 else ""),
        "protected": ", ".join(marks) or "–",
    }
