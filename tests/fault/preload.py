"""Imported once by the fork server: everything that a run needs. Starts no thread and computes nothing."""

import matplotlib.backends.backend_agg
import matplotlib.figure
import peft
import torch.profiler._cupti_monitor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

import reinforge.cli.finetune
import reinforge.engine.engine
import reinforge.engine.model.preflight
import reinforge.evaluation.datasets
import reinforge.trainer.api
import reinforge.trainer.evaluate
import tests.fault.dithered
import tests.fault.kit
import tests.fault.mutations
import tests.fault.poisoned
from reinforge.registry import REGISTRY

REGISTRY.load()

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "matplotlib",
    "modeling_llama",
    "peft",
    "reinforge",
    "tests",
    "torch",
]
