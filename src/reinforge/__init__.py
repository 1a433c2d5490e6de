"""Improves the model behind an LLM agent from the agent's own runs, and proves that it did.

Public names are loaded when they are first used, so `import reinforge` imports no torch.
"""
