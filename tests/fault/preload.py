"""Imported once by the fork server: everything that a run needs. Starts no thread and computes no tensor."""

from pathlib import Path

import torch.profiler._cupti_monitor
from transformers import conversion_mapping
from transformers.models.llama import modeling_llama

import reinforge.cli.finetune
import reinforge.engine.preload
import reinforge.evaluation.datasets
import reinforge.improvement.api
import reinforge.trainer.api
import reinforge.trainer.evaluate
import tests.fault.art_server
import tests.fault.dithered
import tests.fault.job_server
import tests.fault.kit
import tests.fault.learning_server
import tests.fault.mutations
import tests.fault.poisoned
from reinforge.engine.adapter_packages import import_peft
from reinforge.engine.model import architecture
from reinforge.registry import REGISTRY
from reinforge.trainer import provenance

import_peft()
REGISTRY.components()
# what a run looks up once in each process, and which is the same in all: a second of each run's time
list(provenance._list_imported_files(Path("/")))
provenance._map_packages()
conversion_mapping.get_checkpoint_conversion_mapping("llama")  # patterns of all families
list(architecture._find_unknown_family("llama", {}))

__all__ = [
    "modeling_llama",
    "reinforge",
    "tests",
    "torch",
]
