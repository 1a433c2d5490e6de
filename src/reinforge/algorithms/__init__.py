"""Algorithms, listed in `registry.py`: assign advantages to tokens and name a loss. No tensors here."""
