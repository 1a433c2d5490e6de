"""Runs the agent and records every model call exactly as it was sampled."""
