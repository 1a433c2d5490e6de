"""Which models can be trained: what `config.json` says of the layers, compared with what transformers has.

The lists of transformers are read from its files as data: importing them would import torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from reinforge.errors import did_you_mean

HEADS = re.compile(
    r"For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice"
    r"|NextSentencePrediction|ImageClassification|AudioClassification|CTC)$"
)
"""Ends of class names with a head that predicts no next token."""
ENCODERS = {"MaskedLM", "PreTraining", "NextSentencePrediction"}
FAMILIES = ("models/auto/auto_mappings.py", "CONFIG_MAPPING_NAMES")
LANGUAGE_MODELS = ("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
MULTIMODAL = ("models/auto/modeling_auto.py", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
UNCACHED_LAYERS = {
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "indexed_attention",
    "minimax_m3_sparse",
}
"""Types of layers that keep an index or compressed keys between tokens."""
UNCACHED_FAMILIES = {
    "bloom": "takes no positions and no explicit attention mask",
    "deepseek_v32": "keeps an index of its keys (indexed_attention)",
    "glm_moe_dsa": "keeps an index of its keys (indexed_attention)",
    "minimax": "has its own kind of cache",
    "recurrent_gemma": "keeps its recurrent states in its modules, one batch at a time",
    "rwkv": "has its own kind of cache",
    "xlstm": "has its own kind of cache",
}
"""Families that the sampler cannot run, since a reply must be able to join and leave a batch at any token."""
OTHER_FAMILY = "use a model whose layers are listed in docs/models.md (Families)"
DECODER = "use a model that generates text token by token, whose architecture is called ...ForCausalLM"


def find_untrainable(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields why a model cannot be trained or sampled by this engine, and the fix; of its configuration alone.

    Example: `{"model_type": "bert", "architectures": ["BertForMaskedLM"]}` -> it is an encoder, which fills gaps.
    """
    kind = settings.get("model_type")
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if settings.get("is_encoder_decoder"):
        yield f"describes an encoder-decoder ({name or kind}), which reads its prompt apart from its reply", DECODER
        return
    if match := HEADS.search(name):
        what = "an encoder, which fills gaps in text" if match[1] in ENCODERS else f"a head for {match[1]}"
        yield f"describes {name}: {what}, not a model that generates text", DECODER
        return
    if not isinstance(kind, str):
        yield "has no model_type", "give the folder that `save_pretrained` wrote"
        return
    yield from _find_unknown_family(kind[:60], settings)
    yield from _find_uncached_layers(kind, settings)


def _find_uncached_layers(kind: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if kind in UNCACHED_FAMILIES:
        yield f'has the model_type "{kind}", which {UNCACHED_FAMILIES[kind]}: it cannot be sampled here', OTHER_FAMILY
        return
    text = settings.get("text_config")
    types = (text if isinstance(text, dict) else settings).get("layer_types")
    names = {each for each in types if isinstance(each, str)} if isinstance(types, list) else set()
    for name in sorted(UNCACHED_LAYERS & names):
        yield f'has layers of type "{name}", which the sampler has no cache for', OTHER_FAMILY


def _find_unknown_family(kind: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    families, models = read_names(*FAMILIES), read_names(*LANGUAGE_MODELS)
    if not families or not models or kind in models or kind in read_names(*MULTIMODAL):
        return
    if kind not in families:
        version = importlib.metadata.version("transformers")
        hint = did_you_mean(kind, models)
        fix = "pip install -U transformers, if a newer version has it; code that a model brings along is never run"
        yield f'has the model_type "{kind}", which transformers {version} does not have{hint}', fix
        return
    what = "whose text part cannot be used alone" if "text_config" in settings else "that does not generate text"
    yield f'has the model_type "{kind}", a model {what}', DECODER


@cache
def read_names(file: str, name: str) -> frozenset[str]:
    """Returns the keys of a table in a file of transformers, without importing it; none if it cannot be found.

    Args:
        name: Name of the table: a dictionary, or `OrderedDict` of pairs.
    """
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8")) if path is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
    ]
    return frozenset(key for table in tables[:1] for key in _iterate_keys(table))


def _iterate_keys(table: ast.expr) -> Iterator[str]:
    """Yields the text keys of `{"a": ...}`, of `OrderedDict([("a", ...)])` and of `OrderedDict({"a": ...})`."""
    if isinstance(table, ast.Call):
        for argument in table.args:
            yield from _iterate_keys(argument)
        return
    pairs = table.elts if isinstance(table, ast.List | ast.Tuple) else []
    keys = (
        table.keys if isinstance(table, ast.Dict) else [pair.elts[0] for pair in pairs if isinstance(pair, ast.Tuple)]
    )
    for key in keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


logger = logging.getLogger(__name__)

FALLBACK = re.compile(r"falling back to its reference PyTorch implementation because `([\w-]+)` is not installed")
HUB_KERNELS = "transformers.integrations.hub_kernels"


class MissingKernelFilter(logging.Filter):
    """Replaces transformers' warnings by one line of ours for each library."""

    def __init__(self) -> None:
        super().__init__()
        self._named: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        found = FALLBACK.search(record.getMessage())
        if found is None:
            return True
        if found[1] not in self._named:
            self._named.add(found[1])
            logger.info("%s is not installed: its layers run in plain torch (exact, but slower)", found[1])
        return False


def shorten_kernel_warnings() -> None:
    """Installs the filter, once in a process."""
    source = logging.getLogger(HUB_KERNELS)
    if not any(isinstance(each, MissingKernelFilter) for each in source.filters):
        source.addFilter(MissingKernelFilter())
