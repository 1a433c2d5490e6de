"""Text classifiers from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, EngineError, Problem, boundary, did_you_mean
from reinforge.redteam.core.scorer import Scorer


class ClassifierScorer(Scorer[str, str]):
    """The probability that a sequence classifier assigns to one of its labels.

    Example: `ClassifierScorer("path/to/classifier", label="leaks").score(["hello"])` -> `[0.03]`.

    Args:
        model: Folder or hub id; only safetensors weights are loaded.
        label: Name or index of the label; None: the last one. Ignored for a model with a single output.
        device: `auto`, `cpu`, `cuda` or `mps`.
        batch_size: Texts per forward pass; texts are sorted by length first.
    """

    def __init__(
        self, model: str | Path, label: str | int | None = None, *, device: str = "auto", batch_size: int = 32
    ):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from reinforge.engine.checkpoint import hide_progress_bars
        from reinforge.engine.model.hub import check_model_source, check_tokenizer_source
        from reinforge.engine.model.loading import pick_device
        from reinforge.engine.model.model_files import MAKING

        with boundary(EngineError, f"cannot load the classifier {model}"), hide_progress_bars(), MAKING:
            check_tokenizer_source(model, "model")
            is_local = check_model_source(model, "model")
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=is_local
            )
            module: Any = AutoModelForSequenceClassification.from_pretrained(
                model, use_safetensors=True, trust_remote_code=False, local_files_only=is_local
            )
        self.device, self.batch_size = pick_device(device), batch_size
        self.model = module.to(self.device).eval()
        self.index = _find_label(label, dict(module.config.id2label))
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if module.config.pad_token_id is None:  # decoder-only classifiers read the last token that is not padding
            module.config.pad_token_id = self.tokenizer.pad_token_id
        self.max_length = min(self.tokenizer.model_max_length, getattr(module.config, "max_position_embeddings", 512))

    def score(self, x: Sequence[str]) -> list[float]:
        """Returns one probability per text; texts longer than the model's context are truncated."""
        scores, order = [0.0] * len(x), sorted(range(len(x)), key=lambda i: len(x[i]))
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            probabilities = self._probabilities([str(x[i]) or " " for i in indices])
            for index, probability in zip(indices, probabilities, strict=True):
                scores[index] = probability
        return scores

    def _probabilities(self, texts: list[str]) -> list[float]:
        import torch

        encoded = self.tokenizer(
            texts, return_tensors="pt", padding=True, truncation=True, max_length=self.max_length
        ).to(self.device)
        with torch.inference_mode():
            logits_BL = self.model(
                input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]
            ).logits.float()
        if logits_BL.shape[1] == 1:
            return logits_BL[:, 0].sigmoid().tolist()
        return logits_BL.softmax(dim=1)[:, self.index].tolist()


def _find_label(label: str | int | None, names: dict[int, str]) -> int:
    if label is None:
        return len(names) - 1
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    matches = [index for index, name in names.items() if name == label]
    if not matches:
        hint = did_you_mean(str(label), names.values())
        message = f"the classifier has no label {label!r}{hint or ';'} its labels are {', '.join(names.values())}"
        raise ConfigError(Problem("label", message, "use one of them, or None for the last"))
    return matches[0]
