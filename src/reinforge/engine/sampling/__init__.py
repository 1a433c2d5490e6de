"""Sampling: continuous batching over a KV cache, in its own thread."""
