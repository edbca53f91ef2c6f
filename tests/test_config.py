"""Keys, recipes and what overrides what."""

from __future__ import annotations

import pytest

from fedvlm.config import Config, coerce, pairs, recipe, recipes, resolve
from fedvlm.core import FedvlmError


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_resolves_and_says_what_it_is(name):
    setup = resolve(name, {})
    assert setup.recipe.title and setup.recipe.idea
    assert setup.record()["method"] == name


def test_the_papers_settings_are_kept():
    """From the papers' own text (METHODS sheets): a change here is a change of the method."""
    paper = {"settings": "paper"}
    fedot = resolve("fedot", paper)
    assert (fedot.local.lr, fedot.local.weight_decay, fedot.local.epochs, fedot.config.rounds) == (5e-5, 5e-4, 1, 200)
    assert fedot.merge.weights == "uniform" and fedot.adapter.private == ("skew",) and fedot.local.optimiser == "sgd"
    fedclip = resolve("fedclip", paper)
    assert fedclip.local.optimiser == "adam" and 5e-5 <= fedclip.local.lr <= 5e-3
    assert (fedclip.local.batch, fedclip.config.rounds, fedclip.merge.weights) == (32, 200, "size")
    assert recipe("fedot").published["pacs"]["C"] == 96.64


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_defaults():
    assert resolve("fedot", {"lr": "0.5"}).local.lr == 0.5
    assert resolve("fedot", {"weights": "size"}).merge.weights == "size"
    assert resolve("fedot", {"rounds": "3"}).config.rounds == 3
    assert resolve("fedot", {"settings": "paper"}).config.rounds == 200 != Config.rounds


def test_switching_a_part_keeps_what_the_new_one_knows_and_another_method_keeps_nothing():
    setup = resolve("fedclip", {"local": "ditto", "settings": "paper"})
    assert setup.local.lr == 5e-4 and setup.local.optimiser == "adam" and setup.chosen["local"] == "ditto"
    assert resolve("fedavg", {"settings": "paper"}).local.lr == 0.01
    assert resolve("fedot-b", {"adapter": "head", "settings": "paper"}).chosen["adapter"] == "head"  # blocks= fell away


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("False", False), ("no", False), ("1", True), ("0", False)]
)
def test_false_means_false(word, value):
    assert resolve("fedavg", {"cosine": word}).merge.cosine is value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lrr": "1"}, "did you mean lr?"),
        ({"lr": "fast"}, "expected a number"),
        ({"lr": "nan"}, "expected a number"),
        ({"lr": "-1"}, "above 0"),
        ({"rounds": "2.5"}, "whole number"),
        ({"rounds": "-1"}, "at least 0"),
        ({"batch": "0"}, "at least 1"),
        ({"engine": "stackd"}, "did you mean stacked?"),
        ({"cosine": "maybe"}, "true or false"),
        ({"adapter": "rotate"}, "did you mean rotation?"),
        ({"adapter": "nowhere.py"}, "no such file"),
        ({"participation": "0"}, "between 0 and 1"),
        ({"quorum": "2"}, "between 0 and 1"),
        ({"seed": "-1"}, "must be between"),
        ({"betas": "0.9"}, "two values"),
    ],
)
def test_what_does_not_fit_is_named_with_a_way_out(given, words):
    with pytest.raises(FedvlmError, match=words.replace("?", r"\?")):
        resolve("fedavg", given)


def test_words_that_are_no_pairs():
    with pytest.raises(FedvlmError, match="key=value"):
        pairs(["rounds"])
    with pytest.raises(FedvlmError, match="twice"):
        pairs(["lr=1", "lr=2"])
    with pytest.raises(FedvlmError, match="did you mean fedot"):
        recipe("fedott")


def test_a_qualified_key_reaches_its_part_only():
    assert resolve("fedavg", {"local.lr": "0.3"}).local.lr == 0.3
    with pytest.raises(FedvlmError):
        resolve("fedavg", {"merge.lr": "0.3"})


def test_no_key_means_two_things():
    """Every key has one home in every combination of the recipes, so none has to be qualified."""
    from dataclasses import fields

    for name in recipes():
        setup = resolve(name, {})
        names = [f.name for part in (setup.config, setup.adapter, setup.local, setup.merge) for f in fields(part)]
        assert len(names) == len(set(names))


def test_lists():
    assert coerce("x", "a, b", tuple[str, ...]) == ("a", "b")
    assert coerce("x", "none", tuple[str, ...]) == ()
    assert coerce("x", [60, 20, 20], tuple[float, ...]) == (60, 20, 20)


def test_a_part_of_ones_own(tmp_path):
    idea = tmp_path / "shift.py"
    idea.write_text(
        '"""A private bias on the embedding."""\n'
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fedvlm.adapters.base import Adapter\n"
        "@dataclass(frozen=True)\n"
        "class Shift(Adapter):\n"
        '    private: tuple[str, ...] = ("shift",)\n'
        "    strength: float = 1.0\n"
        "    def init(self, task, seed):\n"
        '        return {"shift": torch.zeros(task.dim)}\n'
        "    def logits(self, task, params, x):\n"
        '        return task.scale * (x + self.strength * params["shift"][:, None]) @ task.names().mT\n'
    )
    setup = resolve("fedavg", {"adapter": str(idea), "strength": "0.5"})
    assert setup.adapter.strength == 0.5 and setup.chosen["adapter"] == str(idea)
    (tmp_path / "broken.py").write_text("import nothing_there")
    with pytest.raises(FedvlmError, match="does not import"):
        resolve("fedavg", {"adapter": str(tmp_path / "broken.py")})
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(FedvlmError, match="exactly one"):
        resolve("fedavg", {"adapter": str(tmp_path / "empty.py")})
