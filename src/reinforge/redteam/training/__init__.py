"""The training loop: experiences (`harness.py`), optimizer steps, evaluations and limits, and checkpoints."""
