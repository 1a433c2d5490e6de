"""The API of neural-interactive-proofs: experiments, shared-model groups, rollouts as nested arrays."""
