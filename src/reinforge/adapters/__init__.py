"""Trainer adapters: each one submits jobs to a training backend and serves the policy if the backend does."""
