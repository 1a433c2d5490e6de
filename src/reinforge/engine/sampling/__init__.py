"""Sampling: continuous batching over a KV cache, in a thread of its own."""
