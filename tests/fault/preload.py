"""Imported once by the fork server: everything that a run needs. Starts no thread and computes no tensor."""

from pathlib import Path

import peft
import torch.profiler._cupti_monitor
from transformers import AutoModelForCausalLM, AutoTokenizer, conversion_mapping
from transformers.models.llama import modeling_llama

import reinforge.cli.finetune
import reinforge.engine.engine
import reinforge.engine.model.preflight
import reinforge.evaluation.datasets
import reinforge.improvement.api
import reinforge.trainer.api
import reinforge.trainer.evaluate
import tests.fault.dithered
import tests.fault.kit
import tests.fault.mutations
import tests.fault.poisoned
from reinforge.registry import REGISTRY
from reinforge.trainer import provenance

REGISTRY.components()
# what a run looks up once in each process, and which is the same in all: a second of each run's time
list(provenance._list_imported_files(Path("/")))
provenance._map_packages()
conversion_mapping.get_checkpoint_conversion_mapping("llama")  # patterns of all families

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "modeling_llama",
    "peft",
    "reinforge",
    "tests",
    "torch",
]
