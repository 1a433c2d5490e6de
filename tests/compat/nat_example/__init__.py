"""The tic-tac-toe project of the NeMo Agent Toolkit's RL example, written anew: its imports, settings and step rewards.

Only tests import it: unchanged once `reinforge.compat.nat` is installed, or with its import lines changed.
"""
