"""Runs the agent and records every model call as it was sampled."""
