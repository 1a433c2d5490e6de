"""Debate about cells that the verifier cannot see: each of two provers shows one, then it decides (examples/debate).

cells.py      the problems, and the check of the evidence
protocol.py   the debate with that check
dataset.py    the dataset of problems
starter.py    the debaters' initial model, trained on first use
"""
