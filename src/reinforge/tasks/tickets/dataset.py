"""The dataset of e-mails, each with its true ticket."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SPLITS, SplitDataset
from reinforge.tasks.tickets.grammar import write_email
from reinforge.types.seeding import stable_random


class TicketsDatasetConfig(DatasetConfig, name="tickets"):
    """Number of e-mails per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=4096, ge=1, description="E-mails to train on.")
    num_select: int = Field(default=200, ge=1, description="E-mails to select the best checkpoint on.")
    num_confirm: int = Field(default=500, ge=1, description="E-mails for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the e-mails, together with the split's name.")


@register_dataset(config_type=TicketsDatasetConfig)
class TicketsDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "Subject: ..", "answer": {"product": ...}}`."""

    def rows(self) -> list[dict[str, Any]]:
        rngs = {split: stable_random(self.config.seed, "tickets", split) for split in SPLITS}

        def write(split: str, index: int) -> dict[str, Any]:
            email = write_email(rngs[split])
            return {"question": email.text, "answer": email.ticket}

        return self.write_rows(write)
