"""What a server that does not keep to the protocol gets out of a site: `python benchmarks/attacks.py server`.

Each attempt is played against a site's agent (fedvlm/federation/agent.py) in bytes, as NVFlare would hand them over: its own
transport is not part of it. An attempt ends in one of three ways: the site refuses; it answers, and `fedvlm ledger
--audit` on its ledger says so, or the answer holds nothing (the attempt checks that); or the server has got something, which
is an error here. `trust` numbers the eighteen attacks of 2026-11-18 that all succeeded then.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch

from fedvlm.config.config import resolve
from fedvlm.core.state import Message, Params
from fedvlm.errors import FedvlmError
from fedvlm.federation import budget, ledger
from fedvlm.federation.agent import Agent, Request
from fedvlm.federation.plan import Agreed, Plan, packed_record
from fedvlm.federation.wire import SECURE, Header, octets, pack, pack_message, unpack
from fedvlm.privacy.secure.fixed import SumPlan
from fedvlm.privacy.secure.server import aggregate, draw
from fedvlm.privacy.secure.settings import message_fingerprint

ROOT = Path(__file__).resolve().parent.parent
SITES = ("noto", "openmoji", "twemoji")
CLASSES = ("bird", "clock", "fruit", "hand", "train")
EACH = 10
FEW = "smallest_examples: 1\n"
CONTROL = "control"  # not an attempt: a check of this benchmark
PRIVATE = {"dp": "example", "epsilon": 1.0, "unseen": "", "delta": 1e-3}


class Attempt(NamedTuple):
    family: str
    name: str
    trust: int  # its number in the table of eighteen; 0: not one of them
    play: Callable[[Scene], str]


class Outcome(NamedTuple):
    attempt: Attempt
    how: str  # "refused", "seen" or "nothing in it"; "" where the server got something
    said: str
    seconds: float


class Got(Exception):
    """The server has got something."""


ATTEMPTS: list[Attempt] = []


def attempt(family: str, name: str, trust: int = 0) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """Registers an attempt. It returns why the site refused, or `nothing: …` where an answer holds nothing; "" leaves it to
    the audit of the site's ledger."""

    def add(play: Callable[[Scene], str]) -> Callable[[Scene], str]:
        ATTEMPTS.append(Attempt(family, name, trust, play))
        return play

    return add


class Scene:
    """Three sites with ten images of five classes each, on this machine."""

    def __init__(self, place: Path, images: Path):
        self.place, self.images = place, images
        self.homes: list[Path] = []

    def site(self, name: str = "noto", rules: str = FEW, federation: str = "heart", data: Path | None = None) -> Path:
        home = self.place / federation / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "site.yaml").write_text(rules)
        about = {"site": name, "federation": federation, "data": str(data or self.images / name)}
        (home / "site.json").write_text(json.dumps(about | {"backbone": "mini-clip", "rules": str(home / "site.yaml")}))
        self.homes.append(home)
        return home

    def plan(self, method: str = "fedavg", name: str = "run", federation: str = "heart", **keys: object) -> Plan:
        given = {"unseen": "", "rounds": 2, "engine": "serial", "lr": 0.5} | keys
        return Plan.of(resolve(method, given), federation, name, list(SITES))

    def begun(self, plan: Plan, home: Path | None = None) -> Talk:
        talk = Talk(Agent(home or self.site(), plan.name), plan)
        for error in (talk.look(), talk.begin()):
            if error:
                raise Refusal(error)
        return talk


class Refusal(Exception):
    """The site took no part in the run."""


class Talk:
    """What a server says to one site."""

    def __init__(self, agent: Agent, plan: Plan):
        self.agent, self.plan = agent, plan

    def send(self, frame: bytes) -> tuple[Header, dict[str, Params]]:
        return unpack(self.agent.answer(Request.read(frame)))

    def look(self) -> str:
        return self.send(pack(Header("look"), packed_record(self.plan)))[0].error

    def begin(self, **changes: object) -> str:
        place = list(self.plan.sites).index(self.agent.about.site)
        agreed = replace(Agreed(place, list(CLASSES), []), **changes)  # type: ignore[arg-type]
        return self.send(pack(Header("begin"), packed_record(agreed)))[0].error

    @cached_property
    def model(self) -> Params:
        assert self.agent.client
        return dict(self.agent.client.method.initial)

    def ask(
        self, step: str = "train", round: int = 1, exchange: int = 0, model: Params | None = None, **parts: Params
    ) -> tuple[Header, dict[str, Params]]:
        message = Message(self.model if model is None else model, **parts)  # type: ignore[arg-type]
        return self.send(pack_message(message, Header(step, round, exchange, 7)))

    def other(self, seed: int = 1) -> Params:
        torch.manual_seed(seed)
        return {k: v + torch.randn_like(v) for k, v in self.model.items()}


def played(place: Path, images: Path, one: Attempt) -> Outcome:
    began, scene = time.monotonic(), Scene(place, images)
    try:
        said = one.play(scene)
    except Refusal as refusal:
        said = str(refusal)
    except Got as got:
        return Outcome(one, "", str(got), time.monotonic() - began)
    found = [sentence for home in scene.homes for sentence in ledger.audit(home / ledger.SENT)]
    how = "nothing in it" if said.startswith("nothing: ") else "refused" if said else "seen" if found else ""
    if how == "refused" and scene.homes and not found:
        how, said = "", f"refused ({said}), and the ledger does not say so"
    return Outcome(one, how, said or (found or ["answered"])[0], time.monotonic() - began)


@contextmanager
def emoji() -> Iterator[Path]:
    """The images of the three sites."""
    with tempfile.TemporaryDirectory() as made, zipfile.ZipFile(ROOT / "fedvlm/data/assets/emoji.zip") as box:
        for site in SITES:
            for label in CLASSES:
                some = sorted(n for n in box.namelist() if n.startswith(f"{site}/{label}/"))[:EACH]
                for name in some:
                    (Path(made) / name).parent.mkdir(parents=True, exist_ok=True)
                    (Path(made) / name).write_bytes(box.read(name))
        yield Path(made)


# Requests out of order, repeated, or not of the plan


def refused(answer: tuple[Header, dict[str, Params]]) -> str:
    header, parts = answer
    if not header.error and parts:
        raise Got("an answer with " + ", ".join(parts))
    return header.error


ODD = {
    "a round beyond the plan": (5, {"round": 3}),
    "round 10^12": (5, {"round": 10**12}),
    "training before the first round": (0, {"round": 0}),
    "a negative round": (0, {"round": -1}),
    "a second training in a round": (0, {"exchange": 1}),
    "a negative exchange": (0, {"exchange": -1}),
    "validation that the method does not ask": (0, {"step": "validate", "exchange": 1}),
    "adjustment that the method does not ask": (0, {"step": "adjust", "exchange": 1}),
    "scores in a later exchange": (0, {"step": "score", "exchange": 3}),
    "diagnostics in the middle of a run": (0, {"step": "diagnose"}),
    "the outputs of a rehearsal": (0, {"step": "outputs", "round": 2, "exchange": 1}),
    "scores of base and novel classes": (0, {"step": "novel.shared"}),
    "a step that does not exist": (0, {"step": "upload-everything"}),
    "a step of secure sums in a plain run": (0, {"step": "secure.keys"}),
}
for label, (number, words) in ODD.items():

    @attempt("order", label, number)
    def odd(scene: Scene, words: dict[str, object] = words) -> str:
        return refused(scene.begun(scene.plan()).ask(**words))  # type: ignore[arg-type]


@attempt("order", "the same round with another model")
def another_model(scene: Scene) -> str:
    talk = scene.begun(scene.plan())
    talk.ask()
    return refused(talk.ask(model=talk.other()))


@attempt("order", "a round that is over")
def over(scene: Scene) -> str:
    talk = scene.begun(scene.plan())
    talk.ask(round=2)
    return refused(talk.ask(round=1))


@attempt("order", "training after the scores of its round")
def after_scores(scene: Scene) -> str:
    talk = scene.begun(scene.plan())
    talk.ask("score")
    return refused(talk.ask())


@attempt("order", "another model after the site was restarted")
def restarted(scene: Scene) -> str:
    home, plan = scene.site(), scene.plan()
    talk = scene.begun(plan, home)
    talk.ask()
    return refused(scene.begun(plan, home).ask(model=talk.other()))


@attempt("order", "512 questions for scores with chosen models", 7)
def scores(scene: Scene) -> str:
    talk = scene.begun(scene.plan())
    answers = [talk.ask("score", model=talk.other(k))[0].error for k in range(512)]
    if sum(not e for e in answers) > 1:
        raise Got(f"{sum(not e for e in answers)} scores")
    return answers[-1]


@attempt("order", "the same request a hundred times")
def hundred(scene: Scene) -> str:
    talk = scene.begun(scene.plan())
    answers = [talk.ask()[1]["shared"]["head"] for _ in range(100)]
    if any(not torch.equal(a, answers[0]) for a in answers):
        raise Got("different answers")
    return ""


@attempt("order", "training at a site that is held out")
def held_out(scene: Scene) -> str:
    return refused(scene.begun(scene.plan(unseen="noto")).ask())


@attempt("order", "scores in a round that has none")
def unscored(scene: Scene) -> str:
    return refused(scene.begun(scene.plan(rounds=4, evaluate_every=3)).ask("score", 1))


@attempt("order", "400 noisy releases of a plan with one round", 5)
def releases(scene: Scene) -> str:
    keys = {"strengths": "10", "texts": "4", "balance": False} | PRIVATE
    talk = scene.begun(scene.plan("moments", rounds=1, **keys))
    answers = [talk.ask(round=k)[0].error for k in range(1, 401)]
    if sum(not e for e in answers) > 1:
        raise Got(f"{sum(not e for e in answers)} releases")
    return answers[-1]


# Different stories for different sites


def secure(scene: Scene, plans: list[Plan], tell: Callable[[int], dict[str, object]]) -> str:
    """A secure round in which each site is told its own story, with parameters that agree with it. The server must not open
    the sum."""
    talks = [scene.begun(p, scene.site(n, FEW + "secure: true\n")) for p, n in zip(plans, SITES, strict=True)]
    stories = [{"round": 1, "model": t.model} | tell(i) for i, t in enumerate(talks)]
    client, errors = talks[0].agent.client, list[str]()
    assert client
    merge = client.method.merge
    summed = SumPlan.of(merge.ranges(client.method.model, talks[0].model, 64.0), 3)  # type: ignore[attr-defined]

    def told(i: int) -> bytes:
        """What this site itself takes its story for, so that it does not refuse."""
        asked, one = Header(f"{SECURE}masked", stories[i]["round"]), talks[i].agent.client  # type: ignore[arg-type]
        return bytes.fromhex(one.fingerprint(asked, Message(stories[i]["model"])))  # type: ignore[union-attr, arg-type]

    parameters = draw(range(3), 3, 3, 64.0, told(1))

    def ask(kind: str, payloads: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for i, payload in payloads.items():
            round, message = stories[i]["round"], Message(stories[i]["model"])  # type: ignore[arg-type]
            if kind == "keys":
                payload = parameters._replace(model=told(i)).pack()
            parts = (message.parts() if kind == "masked" else {}) | {SECURE: {"payload": octets(payload)}}
            header, found = talks[i].send(pack(Header(f"{SECURE}{kind}", round), parts))  # type: ignore[arg-type]
            errors.append(header.error) if header.error else None
            if not header.error:
                yield i, found[SECURE]["payload"].numpy().tobytes()

    try:
        total = aggregate(parameters, summed.length, summed.dtype, ask)
        opened = summed.decode(total.sum, 3)
    except FedvlmError as error:
        return f"nothing: {errors[0] if errors else error}"
    longest = max(float(v.abs().max()) for k, v in opened.items() if k.startswith("update/"))
    if longest < 64:  # masks that do not cancel are numbers of any size
        raise Got(f"a sum that opens (longest entry {longest:g})")
    return "nothing: masks that do not cancel"


SECURE_PLAN = {"secure": True, "weights": "uniform"}


@attempt(CONTROL, "three sites that are told the same: the sum opens")
def told_the_same(scene: Scene) -> str:
    try:
        secure(scene, [scene.plan(**SECURE_PLAN)] * 3, lambda i: {})
    except Got:
        return "nothing: an honest sum opens"
    raise Got("this benchmark cannot tell an opened sum")


@attempt("equivocation", "another round for two of three sites", 1)
def two_rounds(scene: Scene) -> str:
    return secure(scene, [scene.plan(**SECURE_PLAN)] * 3, lambda i: {"round": 1 + (i > 0)})


@attempt("equivocation", "a round beyond the plan for two of three sites", 1)
def beyond(scene: Scene) -> str:
    return secure(scene, [scene.plan(**SECURE_PLAN)] * 3, lambda i: {"round": 3 if i else 1})


@attempt("equivocation", "plans with another learning rate", 1)
def two_plans(scene: Scene) -> str:
    return secure(scene, [scene.plan(**SECURE_PLAN, lr=lr) for lr in (0.5, 1e-30, 1e-30)], lambda i: {})


@attempt("equivocation", "another model for one site")
def two_models(scene: Scene) -> str:
    zero = {"head": torch.zeros(len(CLASSES), 256)}
    return secure(scene, [scene.plan(**SECURE_PLAN)] * 3, lambda i: {"model": zero} if i else {})


@attempt("equivocation", "plans with other sites")
def other_sites(scene: Scene) -> str:
    plan = scene.plan(**SECURE_PLAN)
    return secure(scene, [plan, *[replace(plan, sites=[*SITES, "west"])] * 2], lambda i: {})


def secure_talk(scene: Scene, rules: str = "") -> Talk:
    return scene.begun(scene.plan(**SECURE_PLAN), scene.site(rules=FEW + rules))


def keys_of(talk: Talk, clients: int = 3, threshold: int = 3, round: int = 1) -> tuple[Header, dict[str, Params]]:
    client = talk.agent.client
    assert client
    told = message_fingerprint(Message(talk.model), client.about.agreement, SECURE, round, 0)
    payload = draw(range(clients), threshold, clients, 64.0, told).pack()
    return talk.send(pack(Header(f"{SECURE}keys", round), {SECURE: {"payload": octets(payload)}}))


@attempt("equivocation", "its own update in a run with secure=true")
def own_update(scene: Scene) -> str:
    return refused(secure_talk(scene).ask())


@attempt("equivocation", "clients that the plan does not have", 13)
def invented(scene: Scene) -> str:
    return refused(keys_of(secure_talk(scene), 12, 9))


@attempt("equivocation", "a sum of two")
def of_two(scene: Scene) -> str:
    return refused(keys_of(secure_talk(scene), 2, 2))


@attempt("equivocation", "a sum of fewer than the site's rules ask for")
def too_few(scene: Scene) -> str:
    talk = secure_talk(scene, "smallest_cohort: 3\n")
    return refused(keys_of(talk, 3, 2))


@attempt("equivocation", "to go on with a sum in another round")
def moved(scene: Scene) -> str:
    talk = secure_talk(scene)
    keys_of(talk)
    return refused(talk.send(pack(Header(f"{SECURE}shares", 2), {SECURE: {"payload": octets(b"")}})))


@attempt("equivocation", "the masked vector before anything else")
def masked_first(scene: Scene) -> str:
    talk = secure_talk(scene)
    return refused(talk.send(pack(Header(f"{SECURE}masked", 1), {SECURE: {"payload": octets(b"")}})))


# Lies about privacy and the cohort


@attempt("privacy", "noise=0 and clip=1e9 in what was agreed", 2)
def no_noise(scene: Scene) -> str:
    talk = Talk(Agent(scene.site(rules=FEW + "epsilon: 1\n"), "run"), scene.plan(**PRIVATE))
    talk.look()
    agreed = {
        "id": 0,
        "classes": list(CLASSES),
        "nouns": [],
        "privacy": {"level": "example", "noise": 0.0, "clip": 1e9},
    }
    parts = {"json": {"text": octets(json.dumps(agreed).encode())}}
    return refused(talk.send(pack(Header("begin"), parts)))


@attempt("privacy", "another clipping norm in a message", 3)
def other_clip(scene: Scene) -> str:
    keys = PRIVATE | {"dp": "client", "noise_at": "client", "epsilon": 8.0}
    talk = scene.begun(scene.plan(**keys), scene.site(rules=FEW + "epsilon: 8\n"))
    return refused(talk.ask(extra={"dp.clip": torch.tensor(8.0, dtype=torch.float64)}))


NOT_PRIVATE = {
    "a run without noise": {},
    "noise that the server would add": {"dp": "client", "epsilon": 1.0},
    "a noise multiplier of 1e-9 in place of a target": {"dp": "example", "noise_multiplier": 1e-9},
    "a target of fifty": {"dp": "example", "epsilon": 50.0},
    "a method whose local rule has no noise": PRIVATE | {"local": "ditto"},
    "centre=own, whose mean has no bound": PRIVATE | {"centre": "own"},
    "a merge that reads more than updates": PRIVATE | {"merge": "afl"},
}
for label, given in NOT_PRIVATE.items():

    @attempt("privacy", f"under epsilon: 1, {label}", 9 if "centre" in label else 0)
    def under(scene: Scene, given: dict[str, object] = given) -> str:
        return refused(scene.begun(scene.plan(**given), scene.site(rules=FEW + "epsilon: 1\n")).ask())


@attempt("privacy", "delta=0.9 in the plan, so that little noise is enough")
def large_delta(scene: Scene) -> str:
    talk = scene.begun(scene.plan(**PRIVATE | {"delta": 0.9}), scene.site(rules=FEW + "epsilon: 1\ndelta: 1e-3\n"))
    assert talk.agent.client and talk.agent.client.about.release
    spent = budget.spent([talk.agent.client.about.release] * 2, 1e-3)
    if spent > 1:
        raise Got(f"epsilon={spent:g} at the site's delta")
    return f"nothing: epsilon={spent:g} at the site's own delta"


@attempt("privacy", "scores under a budget", 7)
def private_scores(scene: Scene) -> str:
    talk = scene.begun(scene.plan(**PRIVATE), scene.site(rules=FEW + "epsilon: 1\n"))
    header, parts = talk.ask("score", model=talk.other())
    if header.error or any(v.abs().sum() for k, v in parts["values"].items() if k != "count"):
        raise Got("scores")
    return "nothing: zeros"


for step in ("validate", "adjust", "diagnose"):

    @attempt("privacy", f"{step} under a budget")
    def not_covered(scene: Scene, step: str = step) -> str:
        talk = scene.begun(scene.plan(**PRIVATE), scene.site(rules=FEW + "epsilon: 1\n"))
        return refused(talk.ask(step, 2, int(step != "diagnose")))


@attempt("privacy", "a second run when the budget is spent")
def second_run(scene: Scene) -> str:
    home = scene.site(rules=FEW + "epsilon: 1\ndelta: 1e-3\n")
    talk = scene.begun(scene.plan(**PRIVATE), home)
    talk.ask(round=1), talk.ask(round=2)
    return refused(scene.begun(scene.plan(name="again", **PRIVATE), home).ask())


@attempt("privacy", "a second federation when the budget is spent")
def second_federation(scene: Scene) -> str:
    talk = scene.begun(scene.plan(**PRIVATE), scene.site(rules=FEW + "epsilon: 1\ndelta: 1e-3\n"))
    talk.ask(round=1), talk.ask(round=2)
    other = scene.site(rules=FEW + "epsilon: 1\ndelta: 1e-3\n", federation="lung")
    return refused(scene.begun(scene.plan(federation="lung", **PRIVATE), other).ask())


@attempt("privacy", "a cohort smaller than the rules ask for", 13)
def small_cohort(scene: Scene) -> str:
    return refused(scene.begun(scene.plan(), scene.site(rules=FEW + "smallest_cohort: 10\n")).ask())


@attempt("privacy", "sites that are held out, counted into the cohort")
def held_out_cohort(scene: Scene) -> str:
    plan = scene.plan(unseen="openmoji,twemoji")
    return refused(scene.begun(plan, scene.site(rules=FEW + "smallest_cohort: 3\n")).ask())


# Crafted models


@attempt("crafting", "a whole network on pixels", 6)
def pixels(scene: Scene) -> str:
    return refused(scene.begun(scene.plan(on="cnn")).ask())


@attempt("crafting", "one example of each class", 6)
def one_example(scene: Scene) -> str:
    return refused(scene.begun(scene.plan(shots=1), scene.site(rules="")).ask())


CRAFTED: dict[str, Callable[[Talk], dict[str, Params]]] = {
    "a model of another shape": lambda t: {"model": {k: v[:1] for k, v in t.model.items()}},
    "a model with one parameter more": lambda t: {"model": t.model | {"probe": torch.ones(3)}},
    "a model with none": lambda t: {"model": {}},
    "a reference with other names": lambda t: {"reference": {"probe": torch.ones(3)}},
    "a control variate that the method does not have": lambda t: {"extra": dict(t.model)},
}
for label, craft in CRAFTED.items():

    @attempt("crafting", label)
    def crafted(scene: Scene, craft: Callable[[Talk], dict[str, Params]] = craft) -> str:
        talk = scene.begun(scene.plan())
        return refused(talk.ask(**craft(talk)))  # type: ignore[arg-type]


@attempt("side channels", "a model with which one image overflows", 8)
def overflow(scene: Scene) -> str:
    """The same kind of answer, whether a gradient overflows or not."""
    kinds = set()
    for name in SITES[:2]:
        talk = scene.begun(scene.plan(**PRIVATE), scene.site(name, FEW + "epsilon: 1\n"))
        size = 1e38 if name == SITES[0] else 1.0
        huge = {k: size * (-1.0) ** torch.arange(v.numel()).view(v.shape) for k, v in talk.model.items()}
        header, parts = talk.ask(model=huge)
        kinds.add((header.error, tuple(sorted((k, v.shape) for p in parts.values() for k, v in p.items()))))
    if len(kinds) > 1:
        raise Got(f"two kinds of answers: {kinds}")
    return "nothing: the same kind of answer"


@attempt("side channels", "an error with the sizes of the data")
def shapes(scene: Scene) -> str:
    def fails(*given: object) -> None:
        raise ValueError("30 rows of 256 numbers do not fit")

    talk = scene.begun(scene.plan())
    talk.agent.client.engine.run = fails  # type: ignore[union-attr, assignment, method-assign]
    text = refused(talk.ask())
    if any(c.isdigit() for c in text):
        raise Got(text)
    return text


def start_of(scene: Scene, path: Path) -> str:
    return refused(scene.begun(scene.plan(adapter="resnet", on="", start=str(path)), pixels_site(scene)).ask())


def pixels_site(scene: Scene) -> Path:
    return scene.site(rules=FEW + "reveals: pixels\n")


@attempt("side channels", "start= with a name that is there or not", 14)
def start(scene: Scene) -> str:
    plan, found = scene.plan(), set()
    for name in ("site.json", "nothing-of-this-name"):
        adapter = replace(scene.plan(adapter="resnet").adapter)
        crafted = replace(plan, adapter=replace(adapter, settings={**adapter.settings, "start": name}))
        talk = Talk(Agent(pixels_site(scene), plan.name), crafted)
        found.add(talk.look())
    if len(found) != 1 or "" in found:
        raise Got(f"{found}")
    return found.pop()


@attempt("side channels", "start= with a pipe that never ends", 14)
def fifo(scene: Scene) -> str:
    pipe = scene.place / "pipe"
    os.mkfifo(pipe)
    adapter = scene.plan(adapter="resnet").adapter
    plan = replace(scene.plan(), adapter=replace(adapter, settings={**adapter.settings, "start": str(pipe)}))
    return Talk(Agent(pixels_site(scene), plan.name), plan).look()


@attempt("side channels", "features that other users of the machine can read", 10)
def readable(scene: Scene) -> str:
    scene.begun(scene.plan())
    kept = list(Path(os.environ["FEDVLM_CACHE"]).rglob("*.rows"))
    kept += [
        p for home in scene.homes for p in home.rglob("*") if p.is_file() and p.name not in ("site.yaml", "site.json")
    ]
    open_to_all = [p.name for p in kept if stat.S_IMODE(p.stat().st_mode) & 0o077 and p.suffix != ".lock" != p.name]
    if not kept or open_to_all:
        raise Got(f"{open_to_all}")
    return "nothing: only the owner may read"


# One identity for several runs


@attempt("identity", "another plan under the name of a run that began")
def same_name(scene: Scene) -> str:
    home = scene.site()
    scene.begun(scene.plan(), home)
    return refused(scene.begun(scene.plan(lr=0.1), home).ask())


@attempt("identity", "the noise of two runs", 4)
def two_runs(scene: Scene) -> str:
    home = scene.site()
    return different(scene, [(home, "one"), (home, "two")])


@attempt("identity", "the noise of one run with one image more", 4)
def image_more(scene: Scene) -> str:
    data = Path(shutil.copytree(scene.images / "noto", scene.place / "data" / "noto"))
    home, image = scene.site(data=data), sorted((data / "bird").iterdir())[0]
    kept = image.read_bytes()
    image.unlink()
    first = secret_of(scene.begun(scene.plan(**PRIVATE), home))
    image.write_bytes(kept)
    if secret_of(scene.begun(scene.plan(**PRIVATE), home)) == first:
        raise Got("the same noise for other data")
    return "nothing: another key for other data"


def secret_of(talk: Talk) -> str:
    assert talk.agent.client
    return talk.agent.client.about.secret


def different(scene: Scene, runs: list[tuple[Path, str]]) -> str:
    keys = {secret_of(scene.begun(scene.plan(name=name, **PRIVATE), home)) for home, name in runs}
    if len(keys) < len(runs):
        raise Got("the same noise in two runs")
    return "nothing: another key for each run"


@attempt("identity", "noise of two requests in one round")
def two_requests(scene: Scene) -> str:
    talk = scene.begun(scene.plan(**PRIVATE), scene.site())
    talk.ask()
    return refused(talk.ask(model=talk.other()))


AGREED: dict[str, dict[str, object]] = {
    "the number of another site": {"id": 1},
    "other classes than before": {"classes": [*CLASSES, "zebra"]},
    "classes in another order than before": {"classes": list(CLASSES[::-1])},
    "a hundred thousand classes": {"classes": [f"class {k}" for k in range(100_000)]},
    "a hundred thousand words": {"nouns": [f"word {k}" for k in range(100_000)]},
}
for label, changes in AGREED.items():

    @attempt("identity", label, 15 * ("thousand classes" in label))
    def agreed_otherwise(scene: Scene, changes: dict[str, object] = changes) -> str:
        return scene.begun(scene.plan()).begin(**changes)


PLANS: dict[str, Callable[[Plan], Plan]] = {
    "a plan of another federation": lambda p: replace(p, federation="lung"),
    "a plan without this site": lambda p: replace(p, sites=["openmoji", "twemoji"]),
    "a plan of another version": lambda p: replace(p, version="0.0.1"),
    "a plan of another code": lambda p: replace(p, code="0" * 16),
    "a plan with another name than the run": lambda p: replace(p, name="another"),
    "a part that is a module of Python": lambda p: replace(p, adapter=replace(p.adapter, name="os.path")),
    "a part with code of its own": lambda p: replace(p, local=replace(p.local, code="x = 1")),
    "a key that does not exist": lambda p: replace(p, adapter=replace(p.adapter, settings={"shell": "id"})),
    "a slow regular expression": lambda p: replace(p, config=p.config | {"group": "(([a-z0-9/._-]+)+)+!$"}),
    "a regular expression of many stars": lambda p: replace(p, config=p.config | {"group": "(.*).*.*.*.*.*!$"}),
    "outsiders in another folder": lambda p: replace(p, config=p.config | {"outsiders": "/etc"}),
}
for label, change in PLANS.items():

    @attempt("plans", label, 15 * ("slow" in label))
    def planned(scene: Scene, change: Callable[[Plan], Plan] = change) -> str:
        return Talk(Agent(scene.site(), "run"), change(scene.plan())).look()


@attempt("plans", "a method that sends embeddings")
def embeddings(scene: Scene) -> str:
    return refused(scene.begun(scene.plan("feddtl")).ask())


@attempt("plans", "a method that sends class means")
def class_means(scene: Scene) -> str:
    return refused(scene.begun(scene.plan("fedgh")).ask())


@attempt("plans", "a run without secure=true where the rules ask for it")
def not_secure(scene: Scene) -> str:
    return refused(scene.begun(scene.plan(), scene.site(rules=FEW + "secure: true\n")).ask())


# Received folders: no server is needed for these


def given_model(scene: Scene, change: Callable[[Path], None]) -> str:
    from fedvlm import backbones

    folder = Path(shutil.copytree(ROOT / "fedvlm/backbones/assets/mini-clip", scene.place / "model"))
    change(folder)
    try:
        backbones.load(str(folder))
    except FedvlmError as error:
        return str(error)
    raise Got("it was loaded")


def entry(name: str, **entries: object) -> Callable[[Path], None]:
    return lambda folder: write_entries(folder / name, entries)


def write_entries(path: Path, entries: dict[str, object]) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | entries))


INDEX = "model.safetensors.index.json"
FOLDERS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "a kernel of the hub": (11, entry("config.json", attn_implementation="evil/kernel@main")),
    "a kernel of the hub, deep in the configuration": (
        11, entry("config.json", vision_config={"a": [{"_attn_implementation": "evil/kernel"}]}),
    ),
    "a quantiser": (11, entry("config.json", quantization_config={"quant_method": "bitsandbytes"})),
    "weights outside the folder": (12, entry(INDEX, weight_map={"logit_scale": "../outside.safetensors"})),
    "weights at an absolute path": (12, entry(INDEX, weight_map={"logit_scale": "/etc/outside.safetensors"})),
    "a million layers": (17, entry("config.json", vision_config={"num_hidden_layers": 10**6})),
    "images of 60,000 pixels": (17, entry("preprocessor_config.json", size={"shortest_edge": 60_000})),
}  # fmt: skip
for label, (number, spoil) in FOLDERS.items():

    @attempt("received", label, number)
    def received(scene: Scene, spoil: Callable[[Path], None] = spoil) -> str:
        return given_model(scene, spoil)


@attempt("received", "a tar with a head of 200 MiB", 18)
def big_head(scene: Scene) -> str:
    from fedvlm.data.source import open_source

    path = scene.place / "big.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as box:
        member = tarfile.TarInfo("a.cls")
        member.pax_headers = {"comment": "x" * (200 << 20)}
        box.addfile(member, BytesIO(b""))
    try:
        open_source(str(path))
    except FedvlmError as error:
        return str(error)
    raise Got("it was read")


@attempt("received", "a run folder with a name that a shell would run", 16)
def shell_name(scene: Scene) -> str:
    from fedvlm.cli.commands.completion import complete

    before = os.environ.get("FEDVLM_RUNS")
    os.environ["FEDVLM_RUNS"] = str(scene.place)
    try:
        for name in ("a;touch PWNED", "$(touch PWNED)"):
            (scene.place / name).mkdir()
            (scene.place / name / "run.json").write_text("{}")
        if offered := [n for n in complete("fedvlm report ") if "PWNED" in n]:
            raise Got(f"offered: {offered}")
    finally:
        os.environ.pop("FEDVLM_RUNS") if before is None else os.environ.update(FEDVLM_RUNS=before)
    return "nothing: not offered"


def main(_: Sequence[str] = ()) -> int:
    outcomes = list[Outcome]()
    with emoji() as images, tempfile.TemporaryDirectory() as made:
        os.environ |= {"FEDVLM_CACHE": f"{made}/cache"}
        for k, one in enumerate(ATTEMPTS):
            place = Path(made) / str(k)
            place.mkdir()
            os.environ["FEDVLM_DATA_HOME"] = str(place / "kept")
            outcomes.append(found := played(place, images, one))
            number = f"[{one.trust}] " if one.trust else ""
            print(f"{found.how or 'GOT IT':13} {one.family}: {number}{one.name} ({found.said[:110]})", flush=True)
    print("\n| family | attempts | refused | seen by the audit | nothing in the answer | got something |")
    print("|---|---|---|---|---|---|")
    tried = [o for o in outcomes if o.attempt.family != CONTROL]
    for family in [*dict.fromkeys(o.attempt.family for o in tried), "all"]:
        counts = Counter(o.how for o in tried if family in (o.attempt.family, "all"))
        cells = [counts.total(), *(counts[how] for how in ("refused", "seen", "nothing in it", ""))]
        print(f"| {family} | {' | '.join(map(str, cells))} |")
    known = {o.attempt.trust for o in outcomes} - {0}
    print(f"\nof the eighteen attacks: {len(known)} tried; {sum(o.seconds for o in outcomes):.0f} s")
    return int(any(not o.how for o in outcomes) or known != set(range(1, 19)))
