"""The dataset of e-mails, each with its true ticket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.interfaces import Builder, DatasetLoader
from reinforge.registry import register_dataset
from reinforge.tasks.tickets.grammar import write_email
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random


class TicketsDatasetConfig(DatasetConfig, name="tickets"):
    """Number of e-mails per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=4096, ge=1, description="E-mails to train on.")
    num_select: int = Field(default=200, ge=1, description="E-mails to select the best checkpoint on.")
    num_confirm: int = Field(default=500, ge=1, description="E-mails for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the e-mails, together with the split's name.")


class TicketsDataset(DatasetLoader):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "Subject: ...", "answer": {"product": ...}}`.

    No e-mail occurs twice.
    """

    def __init__(self, config: TicketsDatasetConfig):
        self.config = config

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        seen: set[str] = set()
        rows = []
        for split in ("train", "select", "confirm"):
            rng = stable_random(self.config.seed, "tickets", split)
            for index in range(getattr(self.config, f"num_{split}")):
                email = write_email(rng)
                while email.text in seen:
                    email = write_email(rng)
                seen.add(email.text)
                row = {"id": f"{split}-{index:05}", "split": split, "question": email.text, "answer": email.ticket}
                rows.append(row)
        return rows

    def load(self) -> list[EvalInputItem]:
        """Returns every row as an example whose question is the e-mail and whose answer is the ticket."""
        return [
            EvalInputItem(
                id=row["id"],
                input_obj=row["question"],
                expected_output_obj=row["answer"],
                full_dataset_entry=row,
            )
            for row in self.rows()
        ]


@register_dataset(config_type=TicketsDatasetConfig)
async def tickets_dataset(config: TicketsDatasetConfig, builder: Builder) -> AsyncIterator[TicketsDataset]:
    """Yields the dataset."""
    yield TicketsDataset(config)
