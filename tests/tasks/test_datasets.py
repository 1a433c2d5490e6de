"""What the datasets of all tasks share: splits, ids, seeds, and how they are registered."""

import pytest

from reinforge.registry import REGISTRY

NAMES = ("cells", "front_desk", "shop", "tic_tac_toe", "tickets", "word_problems")
SIZES = {"train": 60, "select": 20, "confirm": 30}


async def load(name, sizes=SIZES, **settings):
    component = REGISTRY.get("dataset", name)
    config = component.config_type(**{f"num_{split}": size for split, size in sizes.items()}, **settings)
    [loader] = [each async for each in component.factory(config, None)]
    assert (type(loader).__qualname__, type(loader).__module__) == (component.factory.__qualname__, component.origin)
    return loader


@pytest.mark.parametrize("name", NAMES)
async def test_rows_name_their_split_and_none_occurs_twice(name):
    rows = (await load(name, seed=1)).rows()
    assert rows[17]["id"] == "train-00017"
    assert {split: sum(row["split"] == split for row in rows) for split in SIZES} == SIZES
    assert len({row["id"] for row in rows}) == len({row.get("question", row.get("world_seed")) for row in rows}) == 110
    assert rows == (await load(name, seed=1)).rows()
    assert rows != (await load(name, seed=2)).rows()


@pytest.mark.parametrize("name", NAMES)
async def test_an_example_is_a_row(name):
    loader = await load(name)
    for item, row in zip(loader.load(), loader.rows(), strict=True):
        assert (item.id, item.expected_output_obj, item.full_dataset_entry) == (row["id"], row.get("answer"), row)
        assert item.input_obj == row.get("question", {key: row.get(key) for key in ("side", "opponent", "world_seed")})


@pytest.mark.parametrize(("name", "sizes"), [("word_problems", (4000, 400, 1000)), ("shop", (2000, 200, 500))])
async def test_the_largest_dataset_can_be_made(name, sizes):
    loader = await load(name, dict(zip(SIZES, sizes, strict=True)))
    assert len(loader.rows()) == sum(sizes)
