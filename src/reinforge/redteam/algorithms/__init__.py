"""What is learned from trees of conversations.

dpo.py    the best sibling against the worst; IPO
ppo.py    credit along the path by a critic
grpo.py   credit by comparison with siblings

The formulas are the engine's: each step makes a `TokenBatch` of the system's log-probs and calls a named loss.
"""

from __future__ import annotations

from reinforge.redteam.algorithms.dpo import DPO, IPO, DPOBatch, DPOStep
from reinforge.redteam.algorithms.grpo import GRPO, GRPOBatch, GRPOStep
from reinforge.redteam.algorithms.ppo import PPO, PPOBatch, PPOStep

__all__ = [
    "DPO",
    "GRPO",
    "IPO",
    "PPO",
    "DPOBatch",
    "DPOStep",
    "GRPOBatch",
    "GRPOStep",
    "PPOBatch",
    "PPOStep",
]
