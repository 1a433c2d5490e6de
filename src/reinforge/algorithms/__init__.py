"""Algorithms: assign advantages to tokens and name a loss. No tensors here."""
