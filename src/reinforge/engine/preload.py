"""Imported before a fork, so that the child has what an engine needs; starts no thread and computes no tensor."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from reinforge.engine.engine import Engine

__all__ = ["AutoModelForCausalLM", "AutoTokenizer", "Engine"]
