"""The model of the self-test, without weights."""

from __future__ import annotations

from pathlib import Path

from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, write_blank_model

RECIPE = Recipe(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, max_model_len=32)
NUM_ROWS = 400


def write_model(folder: Path) -> None:
    """Writes tokenizer and configuration; the run initializes the weights at random, from its seed."""
    write_blank_model(folder, RECIPE, make_bpe_tokenizer([], words=r"\S|\s", vocab_size=261))


def list_questions() -> list[dict[str, str]]:
    return [{"id": str(number), "question": f"{number:03d}"} for number in range(NUM_ROWS)]
