"""Agents that are no Python function of the project: programs, deployed agents, and a loop with tools."""
