"""What is measured, and what the columns of tables mean: one definition each, for terminal, page and documents."""

from __future__ import annotations

from typing import NamedTuple


class Measure(NamedTuple):
    """A measure of a method: what its column is called, and what it is."""

    word: str
    meaning: str
    letter: str = ""  # in the papers
    unit: str = ""
    lower: bool = False  # whether less is better

    @property
    def title(self) -> str:
        return " ".join(x for x in (self.word, self.letter, self.unit, "↓" * self.lower) if x)


DEFINED = {  # by the name that tables and CSV files use
    "G": Measure("new clients", "the shared model on clients that nobody trained on", "G", "%"),
    "P": Measure("own clients", "the clients that train, each with the model that it would use", "P", "%"),
    "S": Measure("own, shared", "the clients that train, with the shared model", "S", "%"),
    "C": Measure(
        "all cells",
        "mean over every domain of every run: one new domain and all own ones; no verdict uses it",
        "C",
        "%",
    ),
    "local": Measure("own classes", "own models on the classes that a client trains on", "local", "%"),
    "base": Measure("classes trained on", "own models on all classes that any client trains on", "base", "%"),
    "novel": Measure("new classes", "own models on the classes that no client trains on", "novel", "%"),
    "hm": Measure("harmonic mean", "harmonic mean of base and novel", "hm", "%"),
    "paper G/P/C": Measure("paper G/P/C", "what the method's paper reports, measured with another backbone", "", "%"),
    "paper local/base/novel/hm": Measure(
        "paper local/base/novel/hm", "what the method's paper reports, measured with another backbone", "", "%"
    ),
    "shared base/novel/hm": Measure("shared base/novel/hm", "base, novel and hm of the shared model", "", "%"),
    "worst": Measure("worst client", "own clients: the worst one, or the mean of the worst tenth of many", "", "%"),
    "gap variance": Measure(
        "gap variance", "variance over clients of the generalisation gap, second half of the rounds", lower=True
    ),
    "corrupted": Measure("corrupted", "own clients on corrupted images", "", "%"),
    "AUROC": Measure("AUROC", "how well outsiders are told from known images: area under the ROC curve", "", "%"),
    "FPR95": Measure(
        "FPR95", "outsiders taken for known images where 95 % of the known ones are accepted", "", "%", lower=True
    ),
    "rounds": Measure("rounds", ""),
    "MB": Measure("sent", "sent in both directions, all clients together, whole run", "", "MB", lower=True),
    "seconds": Measure("seconds", "of a run, mean over runs", lower=True),
    "shared": Measure("shared params", "numbers that are sent"),
    "private": Measure("private params", "numbers that stay on a client"),
}
MEANINGS = {name: measure.meaning for name, measure in DEFINED.items() if measure.meaning} | {
    "method": "the method, with the settings in which rows of one method differ",
    "clients per round": "clients that are asked in a round",
    "up per round": "sent from all clients to the server in a round",
    "up in total": "sent from all clients to the server in a run",
    "down per round": "sent from the server to all clients in a round",
    "down in total": "sent from the server to all clients in a run",
    "run": "name of the run folder",
    "folder": "name of the run folder",
    "held out": "the domain or client that nobody trains on",
    "seed": "seed of splits, sampling and initial values",
    "settings that differ": "settings that are not the same for all of these runs",
    "round": "round of training; 0 is before the first",
    "what": "name of the number that the method records, or names of the tensors that were sent",
    "first round": "its value in the first round that recorded it",
    "last round": "its value in the last round that recorded it",
    "meaning": "what the number is, where the method says so",
    "client": "name of the client; “held out” where it did not train",
    "step": "what the client was asked to do",
    "messages": "number of messages received from the client",
    "bytes": "total size of these messages",
    "protected": "whether updates were clipped, noised or masked before they were sent",
    "class": "name of the class",
    "examples": "number of test images of the class, over all runs of the page",
    "view": "shared: the shared model; personal: the client's own",
    "true class": "the class of the image",
    "predicted": "the class that the model predicted instead",
    "count": "number of such images, over all runs of the method on the page",
    "share": "of the test images of that class, in %",
}


def meanings(names: list[str]) -> dict[str, str]:
    """The meanings of columns that are known here; others are named after metrics of the run or after methods."""
    return {n: MEANINGS[n] for n in names if n in MEANINGS}
