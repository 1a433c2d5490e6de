"""An agent, an evaluator and their registration as the NeMo Agent Toolkit's documentation describes them.

Only tests import it: as it is once `reinforge.compat.nat` is installed, or with its import lines changed.
"""
