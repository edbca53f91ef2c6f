"""What a run's models said of every test image, from its outputs.safetensors: needs neither the data nor the backbone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from fedvlm.core.records import RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder

OUTPUTS = "outputs.safetensors"
VIEWS = ("shared", "personal")


@dataclass(frozen=True)
class Answers:
    """One run's test images, an entry each."""

    record: RunRecord
    path: Path
    client: np.ndarray  # number in record.clients
    label: np.ndarray  # number in record.data.classes
    item: np.ndarray  # number of the image in the data
    logits: dict[str, np.ndarray]  # view → [images, classes]; without "personal" where nothing is private

    @cached_property
    def held_out(self) -> np.ndarray:
        unseen = [k for k, name in enumerate(self.record.clients) if name in self.record.finished.unseen]
        return np.isin(self.client, unseen)

    def probabilities(self, view: str) -> np.ndarray | None:
        """The probability of each class; of clients that did not train, the personal view is the shared model's."""
        shared, own = self.logits.get("shared"), self.logits.get("personal")
        if view == "shared" or own is None:
            return None if shared is None else softmax(shared)
        return softmax(own if shared is None else np.where(self.held_out[:, None], shared, own))

    @cached_property
    def said(self) -> dict[str, np.ndarray]:
        """The class that each model gives, by view."""
        return {v: p.argmax(1) for v in VIEWS if (p := self.probabilities(v)) is not None}

    @cached_property
    def names(self) -> list[str]:
        return [self.client_name(k) for k in range(len(self.record.clients))]

    def client_name(self, k: int) -> str:
        name = self.record.clients[k]
        return f"{name} (held out)" if name in self.record.finished.unseen else name

    def features(self, view: str, chosen: np.ndarray) -> np.ndarray | None:
        """Image features of some of the images; None where there are none."""
        with safe_open(self.path, "np") as file:
            name = f"{view}.features"
            if name not in file.keys():  # noqa: SIM118
                return None
            found = np.asarray(file.get_tensor(name)[chosen], float)
        return found if found.ndim == 2 and np.isfinite(found).all() else None


def softmax(logits: np.ndarray) -> np.ndarray:
    grown: np.ndarray = np.exp(logits - logits.max(1, keepdims=True))
    grown /= grown.sum(1, keepdims=True)
    return grown


def answers(run: RunFolder) -> Answers | None:
    """None where the run is not of classes or kept no outputs; an error where the file does not fit its record."""
    path, record = run.folder / OUTPUTS, run.record
    if record.result is None or record.data.metric != "accuracy" or not path.is_file():
        return None
    try:
        with safe_open(path, "np") as file:
            names = set(file.keys())
            if not {"client", "label", "item"} <= names:
                return None
            client, label, item = (np.asarray(file.get_tensor(k)) for k in ("client", "label", "item"))
            logits = {v: np.asarray(file.get_tensor(f"{v}.logits"), float) for v in VIEWS if f"{v}.logits" in names}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise FedvlmError(
            f"{path} is damaged ({error}); leave the run out, or make the page without --details"
        ) from error
    count, classes = label.shape, len(record.data.classes)
    fits = len(count) == 1 and client.shape == item.shape == count and bool(logits)
    fits = fits and all(v.shape == (*count, classes) and np.isfinite(v).all() for v in logits.values())
    fits = fits and within(client, len(record.clients)) and within(label, classes) and bool((item >= 0).all())
    if not fits:
        raise FedvlmError(
            f"{path} does not fit the run's record; leave the run out, or make the page without --details"
        )
    return Answers(record, path, client, label, item, logits)


def within(values: np.ndarray, high: int) -> bool:
    return values.dtype.kind in "iu" and bool(((values >= 0) & (values < high)).all())
