"""`make clients` runs every block of docs/tinker.md with Tinker's packages; here it is checked that it does."""

import ast
import re

import pytest
import yaml

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.tinker.service import TinkerAdapterConfig
from tests.clients.__main__ import ENVIRONMENTS
from tests.clients.tinker_page import PAGE, read_blocks, read_commands, read_recipes
from tests.clients.tinker_recipes import DIFFERENCE, LOSS, RECIPES, REWARD, Recipe, measure_progress

TEXT = PAGE.read_text(encoding="utf-8")


def test_every_recipe_on_the_page_is_run():
    assert {f"tinker_cookbook.recipes.{name}.train" for name in RECIPES} == set(read_recipes())
    assert sum(recipe.measure == REWARD for recipe in RECIPES.values()) == 3


def test_the_blocks_are_those_that_are_run():
    languages = re.findall(r"^```(\w*)\n(?:.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    assert sorted(languages) == ["", "bash", "bash", "python", "python", "yaml"]
    [served] = read_commands("reinforge")
    assert served[1::2] == ["serve", "--tinker"]
    defined = [node.name for code in read_blocks("python") for node in ast.parse(code).body if hasattr(node, "name")]
    assert defined == ["train", "ask"]


def test_the_configuration_is_one():
    [block] = map(yaml.safe_load, read_blocks("yaml"))
    service = block["trainer_adapters"][block["finetuning"]["trainer_adapter"]]
    assert service.pop("_type") == "tinker"
    assert TinkerAdapterConfig(**service).base_model == PolicyConfig(**block["finetuning"]["policy"]).model


def test_the_versions_are_those_that_are_installed():
    [environment] = [each for each in ENVIRONMENTS if each.name == "tinker"]
    for package in ("tinker", "tinker-cookbook"):
        [version] = re.findall(rf"`{package}` ([\d.]+\d)", TEXT)
        assert f"{package}=={version}" in environment.bare


def rows(*values, difference=1e-7, measure=REWARD):
    return [{measure: value, DIFFERENCE: difference} for value in values]


def test_a_reward_must_rise_and_a_loss_fall():
    rewarded, supervised = Recipe(REWARD, 0.1, {}), Recipe(LOSS, 0.1, {})
    assert measure_progress(rewarded, rows(0.0, 0.2, 0.9, 0.3, 0.6, 0.6)) == pytest.approx((0.1, 0.5))
    assert measure_progress(supervised, rows(2.0, 1.0, 1.0, 1.0, 1.0, measure=LOSS)) == pytest.approx((1.5, 1.0))
    with pytest.raises(ValueError, match="does not get better"):
        measure_progress(rewarded, rows(0.5, 0.5, 0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="does not get better"):
        measure_progress(supervised, rows(1.0, 1.0, 2.0, 2.0, 2.0, measure=LOSS))
    with pytest.raises(ValueError, match="does not get better"):
        measure_progress(rewarded, rows(0.0, 0.0, float("nan"), 1.0, 1.0))


def test_the_sampler_must_have_the_weights_that_are_trained():
    recipe, rewards = Recipe(REWARD, 0.1, {}), (0.0, 0.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="is not near zero"):
        measure_progress(recipe, rows(*rewards, difference=-0.01))
    with pytest.raises(ValueError, match="is not near zero"):
        measure_progress(recipe, [{REWARD: reward} for reward in rewards])
