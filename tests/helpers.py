"""Small tasks, data, towers and runs for the tests, and how to build and play any combination of parts on them.

Nothing here lists adapters by name: `example` chooses task and data from what an adapter declares (task_type, view,
requires, NeedsNouns), and `small_sizes` shrinks an adapter by the names of its fields. A new adapter needs no entry.
"""

from __future__ import annotations

import contextlib
import copy
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from fedvlm.backbones import load
from fedvlm.backbones.known import two_towers
from fedvlm.backbones.preprocessing import Preprocessing
from fedvlm.config import recipe
from fedvlm.config.config import Config, Setup, resolve
from fedvlm.config.keys import keys_of
from fedvlm.core.adapter import Adapter, HasTowers, NeedsNouns, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.local import Local
from fedvlm.core.merge import Merge
from fedvlm.core.state import Message, Params, Reply, State, is_running_statistic
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data import encode_server
from fedvlm.data.pool import Pool, Pools
from fedvlm.data.source import Item, Source
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.federation import wire
from fedvlm.federation.engines.loopback import Inbox
from fedvlm.federation.worker import SiteClient
from fedvlm.parts import registry
from fedvlm.rounds.method import Method
from fedvlm.towers.modules import TwoTowers, VisionSizes, VisionTower
from fedvlm.towers.text import TextTower
from fedvlm.towers.vision import ImageLayers, Towers
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

if TYPE_CHECKING:
    from transformers import CLIPModel

    from fedvlm.backbones.hf import ImageTower
    from fedvlm.towers.whole import WholeModel

STYLES = ("noto", "twemoji", "openmoji")  # domains and classes of the fixture `images`
CLASSES = ("bird", "clock", "fruit", "hand", "train")
NOUNS = ("cloud", "anvil", "treaty", "moss")
RAGGED = ((30, 6, 7), (8, 0, 3), (20, 5, 4), (1, 1, 1), (13, 2, 0), (0, 4, 4))  # train, val, test of each client
ABLE = np.array([0, 1, 2, 3, 4])  # clients of RAGGED that can train; client 5 has no training examples
RULES = {"lr": 0.05, "batch": 4, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}

# Sizes of adapters by field name, used where a field's default is larger: the contract does not depend on size.
SMALL = {
    "bottleneck": 4, "context": 2, "count": 3, "depth": 2, "embed": 2, "experts": 2, "global_prompts": 2, "hidden": 3,
    "iterations": 10, "layers": 2, "levels": 1, "local_prompts": 2, "patches": 2, "rank": 2, "size": 3, "tokens": 2,
    "width": 2,
}  # fmt: skip
# Settings that make an adapter run more of its code than the default does.
# ratio: with a fifth of its module one client's CLIP-Adapter hardly helps the others in four rounds.
THOROUGH: dict[str, Any] = {"ratio": 0.9, "deep": True, "projections": ("q", "k", "v", "out")}


# Tasks and data


def random_task(classes: int = 5, dim: int = 16) -> Task:
    text = torch.randn(classes, dim, generator=torch.Generator().manual_seed(1))
    return Task(tuple(f"class {c}" for c in range(classes)), F.normalize(text, dim=-1), dim, 8.0)


def random_data(task: Task, sizes: Sequence[Sequence[int]] = RAGGED) -> Data:
    """Embeddings near those of the class names. The default clients include one with a single example per split, one
    without validation, one without test and one without training examples."""
    draw = torch.Generator().manual_seed(2)
    cells = np.array(sizes)
    ends = cells.sum(1).cumsum()
    starts = ends - cells.sum(1)
    bounds = np.concatenate([starts[:, None], starts[:, None] + cells.cumsum(1)], axis=1)
    y = torch.randint(len(task.classes), (int(ends[-1]),), generator=draw)
    noise = torch.randn(int(ends[-1]), task.dim, generator=draw)
    x = F.normalize(task.names()[y].to(noise.dtype) + 0.7 * noise, dim=-1)
    return Data(x, y, bounds, np.arange(len(sizes)), seed=3, rounds=4)


def patched(data: Data) -> Data:
    """Each embedding followed by six patch embeddings around it, in float16 as they are stored."""
    noise = torch.randn(len(data.y), 7, data.x.shape[1], generator=torch.Generator().manual_seed(6))
    noise[:, 0] = 0
    return replace(data, x=F.normalize(data.x[:, None].to(noise) + 0.3 * noise, dim=-1).half())


def layered(task: Task, sizes: Sequence[Sequence[int]] = RAGGED) -> tuple[Task, Data]:
    """Activations of a class token and four patches, and the class names as the tiny text tower encodes them."""
    data, reader = random_data(task, sizes), tiny_towers().text
    lift = torch.randn(5 * 12, task.dim, generator=torch.Generator().manual_seed(4))
    phrases = tuple(f"a photo of a {name}" for name in task.classes)
    text = reader.features(reader.phrases(phrases))[0]
    task = task._replace(tower=tiny_towers(), text=text, phrases=phrases)
    return task, replace(data, x=(data.x.to(lift) @ lift.T).view(-1, 5, 12))


def pixels(task: Task, size: int, sizes: Sequence[Sequence[int]] = RAGGED) -> Data:
    """Images of the classes."""
    data = random_data(task, sizes)
    lift = torch.randn(3 * size**2, task.dim, generator=torch.Generator().manual_seed(4))
    images = (128 + 40 * data.x.to(lift.dtype) @ lift.T).clamp(0, 255).to(torch.uint8).view(-1, 3, size, size)
    return replace(data, x=images)


def characters(task: Task, sizes: Sequence[Sequence[int]] = RAGGED) -> Data:
    """Six characters before each label."""
    data = random_data(task, sizes)
    before = torch.stack([(data.y + k) % len(task.classes) for k in range(6)], dim=1)
    return replace(data, x=before.to(torch.uint8))


def example(adapter: str | Adapter, sizes: Sequence[Sequence[int]] = ()) -> tuple[Task, Data]:
    """A task and data that this adapter can learn, from what it declares; sizes=() is RAGGED, a fifth of it for images."""
    chosen = small_adapter(adapter) if isinstance(adapter, str) else adapter
    view = chosen.view.partition("@")[0]
    default = tuple(tuple(-(-n // 5) for n in cell) for cell in RAGGED) if view == "pixels" else RAGGED
    masks, nouns = chosen.task_type is SEGMENTATION, isinstance(chosen, NeedsNouns)
    size = tuple(tuple(cell) for cell in sizes) or default
    return _example(view, chosen.requires, masks, nouns, size, torch.get_default_dtype())


@lru_cache
def _example(
    view: str, requires: str, masks: bool, nouns: bool, sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> tuple[Task, Data]:
    task = random_task()
    if view in ("embedding", "raw"):
        data = random_data(task, sizes)
        data = replace(data, x=5 * data.x) if view == "raw" else data
    elif view == "patches":
        data = patched(random_data(task, sizes))
    elif view == "hidden":
        task, data = layered(task, sizes)
    elif view == "pixels":  # of 10, a residual network's last stage has more than one left for its batch norm
        data = pixels(task, 8 if requires or masks else 10, sizes)
    elif view == "text":
        data = characters(task, sizes)
    else:
        raise ValueError(f"view={view}: helpers.py has no example data for it; add some")
    if masks:
        data = replace(data, y=(data.x[:, 0] > 128).to(torch.uint8))
    towers = {"": lambda: None, "text tower": tiny_reader, "image tower": tiny_tower, "both towers": tiny_towers}
    towers |= {"whole model": tiny_whole}
    if requires == "whole model":
        task = task._replace(phrases=task.classes)
    return task._replace(tower=towers[requires](), nouns=NOUNS if nouns else ()), data


def numbered(items: Sequence[Item]) -> Pool:
    """A pool whose row i holds the number i."""
    source = Source("numbered", Path("nowhere"), tuple(items))
    x = torch.arange(len(items), dtype=torch.float32)[:, None]
    return Pool(source, x, Task(tuple(source.classes), None, 1, 1.0), "f", "none")


# Towers with random weights, drawn in float32 so that they do not depend on the test that asks first


@contextlib.contextmanager
def drawn(seed: int) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def tiny_tower() -> ImageTower:
    """A CLIP image tower, 8 pixels wide, in the default dtype."""
    return _tiny_tower(torch.get_default_dtype())


@lru_cache
def _tiny_tower(dtype: torch.dtype) -> ImageTower:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from fedvlm.backbones.hf import ImageTower

    config = CLIPVisionConfig(
        hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    with drawn(7):
        model = CLIPVisionModelWithProjection(config).eval().requires_grad_(False).to(dtype)
    vision = VisionTower(VisionSizes(4, 8, 1, 2, "quick_gelu", 1e-5, 8, 4), "clip").to(dtype).requires_grad_(False)
    vision.load_state_dict(model.vision_model.state_dict())
    return ImageTower(vision, model.visual_projection, Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.2)))


@lru_cache
def tiny_reader() -> TextTower:
    """A CLIP text tower, in float64."""
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = size | {"max_position_embeddings": 12, "vocab_size": 49408}
    with drawn(8):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=size, projection_dim=16))
    return TextTower.of(ours(model), load("mini-clip").tokenizer).to(dtype=torch.float64)


@lru_cache
def tiny_clip(layers: int = 2) -> CLIPModel:
    """A whole CLIP with so many layers per tower and four patches, in float64."""
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": layers, "num_attention_heads": 2}
    text = size | {"max_position_embeddings": 16, "vocab_size": 49408, "bos_token_id": 49406, "eos_token_id": 49407}
    vision = size | {"hidden_size": 12, "image_size": 8, "patch_size": 4}
    draw = torch.Generator().manual_seed(9)
    with drawn(9):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).double()
    for weight in model.parameters():  # new norms are ones and zeros, which hide mistakes
        weight.data.add_(torch.randn(weight.shape, generator=draw, dtype=torch.float64) * 0.2)
    return model.eval().requires_grad_(False)


def ours(model: CLIPModel) -> TwoTowers:
    """A CLIP of transformers', with its weights in our own modules."""
    return two_towers("a test", model.config.to_dict(), model.state_dict())


def tiny_whole() -> WholeModel:
    """All of `tiny_clip`, in the default dtype."""
    return _tiny_whole(torch.get_default_dtype())


@lru_cache
def _tiny_whole(dtype: torch.dtype) -> WholeModel:
    from fedvlm.backbones.hf import ImageTower
    from fedvlm.towers.whole import WholeModel

    model = ours(copy.deepcopy(tiny_clip()).to(dtype))
    norm = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.2))
    image = ImageTower(model.vision_model, model.visual_projection, norm)
    return WholeModel(image, model, load("mini-clip").tokenizer)


@lru_cache
def tiny_towers() -> Towers:
    """Both towers of `tiny_clip`."""
    model = ours(tiny_clip())
    return Towers(ImageLayers.of(model), TextTower.of(model, load("mini-clip").tokenizer))


# Methods


def small_sizes(adapter: str | type) -> dict[str, Any]:
    """Settings that make this adapter small, by the names of its fields."""
    return dict(_small_sizes(registry.find("adapter", adapter) if isinstance(adapter, str) else adapter))


@lru_cache
def _small_sizes(kind: type) -> dict[str, Any]:
    hints, found = typing.get_type_hints(kind), dict[str, Any]()
    for field in fields(kind):
        if field.name in THOROUGH:
            found[field.name] = THOROUGH[field.name]
        elif field.name in SMALL and isinstance(field.default, int) and field.default > SMALL[field.name]:
            allowed = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is Literal else ()
            found[field.name] = min(allowed, default=SMALL[field.name])
    return found


def small_adapter(adapter: str | type, **settings: Any) -> Adapter:
    if isinstance(adapter, str) and not settings:
        return plain_adapter(adapter)
    kind = registry.find("adapter", adapter) if isinstance(adapter, str) else adapter
    return kind(**(small_sizes(kind) | settings))


@lru_cache
def plain_adapter(name: str) -> Adapter:
    kind = registry.find("adapter", name)
    return kind(**small_sizes(kind))


def small_parts(adapter: str, local: str, merge: str, **rules: Any) -> tuple[Adapter, Local, Merge]:
    """The three parts with small sizes and the tests' optimiser settings; `rules` go to the local rule."""
    server, kind = registry.find("merge", merge)(), registry.find("local", local)
    model = small_adapter(adapter)
    if isinstance(model, HasTowers) and server.incompatible(model):
        model = replace(model, towers="image")  # a merge that trains the text tower itself
    gentle = {"lr": 0.02} if "ascent" in {f.name for f in fields(kind)} else {}  # the hardest examples pull strongly
    if any(map(is_running_statistic, initial(adapter))):
        gentle = {"lr": 0.005}  # batch norm over a few numbers: rounding errors grow fast
    return model, kind(**(RULES | gentle | rules)), server


@lru_cache
def initial(adapter: str) -> tuple[str, ...]:
    """The names of the adapter's parameters."""
    chosen = small_adapter(adapter)
    return tuple(chosen.init(example(chosen)[0], 5))


def build(adapter: str, local: str, merge: str, **rules: Any) -> Method:
    chosen = small_parts(adapter, local, merge, **rules)
    return Method.build(*chosen, example(chosen[0])[0], seed=5)


def parts_of(method: Method) -> list[str]:
    """The names of adapter, local rule and merge."""
    return [type(getattr(method, axis)).__module__.rsplit(".", 1)[-1] for axis in registry.AXES]


@lru_cache
def published() -> set[tuple[str, str, str]]:
    """The combinations that recipes use, on their own adapter and on each preset that they can be put on."""
    found = set()
    for name in recipe.recipe_names():
        for on in ("", *recipe.presets()):
            try:
                plan = recipe.load(name, on)
            except FedvlmError as error:
                assert on and "depends on its adapter" in str(error), error
            else:
                found.add((plan.adapter, plan.local, plan.merge))
    return found


class Played(NamedTuple):
    state: State
    rows: Params  # the private rows of all clients
    scores: Params  # the reply to the last step `score`, of all clients
    cohort: Cohort | None  # of the last round


def play(
    method: Method,
    data: Data,
    chunk: int,
    rounds: int = 3,
    ids: np.ndarray = ABLE,
    rows: Path | None = None,
    state: State | None = None,
    start: int = 1,
    lost: frozenset[int] = frozenset(),
) -> Played:
    """Some rounds with `chunk` clients side by side."""
    engine = Stacked(method, data, chunk, rows)
    state = state or method.init(len(data))
    cohort = None
    for round in range(start, start + rounds):
        cohort = Cohort(engine, ids, round, lost=lost)
        state = method.round(state, cohort)
    everybody = np.arange(len(data))
    scores = Cohort(engine, everybody, start + rounds - 1).ask("score", state.message()).values
    return Played(state, engine.rows.read(everybody, start + rounds - 1), scores, cohort)


def message(method: Method, clients: int = 6) -> Message:
    """What the server sends first in the first round."""

    class Sent(Exception):
        pass

    class Recorder:
        def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
            raise Sent(message)

        def outputs(self, message: Message, round: int) -> Params:
            return {}

        def close(self) -> None:
            pass

    try:
        method.round(method.init(clients), Cohort(Recorder(), ABLE, 1))
    except Sent as sent:
        found: Message = sent.args[0]
        return found
    raise AssertionError(f"merge={parts_of(method)[2]} sends nothing in its first round")


def close(a: Params, b: Params, tolerance: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for name in a:
        one, other = a[name], b[name]
        alike = one.shape == other.shape and one.dtype == other.dtype
        if not (alike and torch.allclose(one, other, rtol=tolerance, atol=tolerance)):  # a tenth of assert_close's time
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def same(a: Params, b: Params) -> None:
    """Equal bit for bit."""
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# Runs


def small_setup(images: Path, method: str = "fedot", **keys: Any) -> Setup:
    return resolve(method, {"data": str(images), "unseen": "openmoji", "rounds": 3, "lr": 0.05, **keys})


def train_small(images: Path, folder: Path, method: str = "fedot", **keys: Any) -> RunFolder:
    """A run of three rounds on the fixture `images`."""
    setup = small_setup(images, method, **keys)
    return train.train(PlannedRun(setup, Pools().load(setup), folder))


OTHERS = {"backbone": "pixels:8", "engine": "serial", "metrics": ("ece",), "split": (70.0, 10.0, 20.0), "seeds": (1, 2)}
OTHERS |= {"log": ("tensorboard",), "launch": ("gpus_per_node:1",)}


def other_values() -> dict[str, Any]:
    """Of each key of a run, a value that is allowed and is not the default; a new key needs no entry, unless it takes
    several values or names something."""
    found = dict[str, Any](OTHERS)
    for key in keys_of(Config):
        if key.choices and not key.length:
            found[key.name] = next(c for c in key.choices if c != key.default)
        elif not key.length and key.type == "bool":
            found[key.name] = not key.default
        elif not key.length and key.type == "int":
            found[key.name] = key.default + 1
        elif not key.length and key.type == "float":
            tries = [key.default / 2, (key.default + 1) / 2]
            found[key.name] = next(v for v in tries if v != key.default and key.range.holds(v))
        else:
            found.setdefault(key.name, ("other",) if key.length else "other")
    assert found.keys() == {f.name for f in fields(Config)} and all(found[k] != getattr(Config(), k) for k in found)
    return found


class InProcess:
    """A client of the loopback engine that is built from its folder and answers in bytes, in this process."""

    def __init__(self, client: int, folder: Path, inbox: Inbox):
        self.client, self.inbox, self.limit, self.alive = client, inbox, 0, True
        self.serves = SiteClient(folder)

    def post(self, frame: bytes) -> None:
        answer = self.serves.answer(*wire.unpack(frame))
        assert len(answer) <= self.limit
        self.inbox.put((self.client, answer))

    def stop(self) -> None:
        self.alive = False

    kill = stop


def all_answered(running: encode_server.EncodeServer) -> None:
    """Waits until no request is under way: all that the server writes into its log about them is there."""
    for _ in range(encode_server.CONNECTIONS):
        assert running.connections.acquire(timeout=10), "a request is still under way"
    running.connections.release(encode_server.CONNECTIONS)


def state_of(folder: Path) -> dict[str, bytes]:
    """The bits of the saved state; the file's checksum depends on the run's settings, such as the engine."""
    return {k: v.numpy().tobytes() for k, v in load_file(folder / "state.safetensors").items()}


def scores(run: RunFolder) -> list[dict[str, Any]]:
    """The run's records of rounds without the time they took."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in run.rounds()]


FEDDTL = {"rounds": 4, "tolerance": 2.0, "patience": 1, "rank": 1, "text_rank": 1, "layers": 1, "text_layers": 1}
FEDDTL |= {"projections": "q", "updates": 2, "epochs": 1, "batch": 16, "seed": 7, "engine": "serial"}
FEDDTL |= {"protocol": "base-to-novel", "partition": "iid", "clients": 2}


def train_feddtl(images: Path, folder: Path, **keys: Any) -> RunFolder:
    """A run of FedDTL through both of its stages."""
    setup = resolve("feddtl", FEDDTL | {"data": str(images)} | keys)
    return train.train(PlannedRun(setup, Pools().load(setup), folder))
