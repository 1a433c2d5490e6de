"""Several processes and machines: Ray, torchrun and vLLM."""
