"""vLLM as the sampler of the embedded engine."""
