"""Sentence embeddings by all-MiniLM-L6-v2 on the CPU, from the package that carries its weights.

The embedding of a string is the mean of the last hidden states of its tokens, with length 1 (Sentence-BERT,
arXiv:1908.10084). Of the package only `model.zip` is read, into memory; its code needs sentence-transformers.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertModel

from reinforge.engine.model.model_files import MAKING
from reinforge.engine.packages import EMBEDDINGS
from reinforge.errors import EngineError, boundary

SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
FILES, MAX_BYTES = ("tokenizer.json", "model.safetensors"), 256 << 20
MAX_TOKENS, MAX_CHARACTERS, BATCH = 256, 5_000, 32


def load_embedder() -> SentenceEmbedder:
    spec = importlib.util.find_spec(EMBEDDINGS)  # does not import it
    return SentenceEmbedder(Path(*((spec and spec.submodule_search_locations) or ())[:1], "model.zip"))


class SentenceEmbedder:
    """Embeds strings; raises `EngineError` if the archive is damaged, or is not that of this model."""

    def __init__(self, archive: Path) -> None:
        with boundary(EngineError, f"cannot load the sentence embeddings of {archive}"):
            with zipfile.ZipFile(archive) as files:
                if max(files.getinfo(name).file_size for name in FILES) > MAX_BYTES:  # `read` unpacks no more than that
                    raise ValueError(f"a file has more than {MAX_BYTES >> 20} MiB")
                tokenizer, weights = (files.read(name) for name in FILES)
            self._tokenizer = Tokenizer.from_str(tokenizer.decode())
            with MAKING, torch.random.fork_rng(devices=[]):  # a run samples the same with the package and without it
                self._model = BertModel(BertConfig(**SIZES), add_pooling_layer=False).float().eval()
            if missing := self._model.load_state_dict(load(weights), strict=False).missing_keys:
                raise ValueError(f"no weights for {missing[0]}")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns embeddings `[N, 384]`; zeros for a string too long to be read whole, which is similar to none."""
        ids = [self._encode(text) for text in texts]
        embeddings_ND = torch.zeros(len(ids), SIZES["hidden_size"])
        order = sorted((at for at, each in enumerate(ids) if len(each)), key=lambda at: len(ids[at]))
        for batch in (order[start : start + BATCH] for start in range(0, len(order), BATCH)):
            ids_BT = pad_sequence([ids[at] for at in batch], batch_first=True)
            mask_BT = pad_sequence([torch.ones_like(ids[at]) for at in batch], batch_first=True)
            hidden_BTD = self._model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
            embeddings_ND[batch] = torch.nn.functional.normalize((hidden_BTD * mask_BT.unsqueeze(-1)).sum(dim=1))
        return np.asarray(embeddings_ND)

    def _encode(self, text: str) -> torch.Tensor:
        ids = self._tokenizer.encode(text[: MAX_CHARACTERS + 1].encode(errors="replace").decode()).ids
        return torch.tensor(ids if len(ids) <= MAX_TOKENS and len(text) <= MAX_CHARACTERS else [], dtype=torch.long)
