"""Training: samples, shared prefixes, log-probs, optimizer steps."""
