"""Debate about cells that the verifier cannot see: each of two provers shows one, then it decides (examples/debate).

cells.py      the problems, their dataset, and the debate that checks the evidence
starter.py    the debaters' initial model, trained on first use
"""
