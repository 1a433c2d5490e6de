"""Trainer adapters: submit jobs to a training backend, serve its policy. Listed in `registry.py` with `protocols`'."""
