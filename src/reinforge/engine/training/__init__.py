"""Training: micro-batches, shared prefixes, log-probs and optimizer steps."""
