"""Algorithms that train on trees of conversations.

dpo.py    DPO and IPO: the best sibling is preferred to the worst
ppo.py    PPO: advantages along each path, from a critic
grpo.py   GRPO: advantages relative to the siblings
steps.py  what they share: which nodes are trained, per-token lists to padded tensors and back

The losses are the engine's: each step builds a `TokenBatch` from the system's log-probs and calls a loss by name.
"""
