"""Agents that are not Python functions of the project: programs, deployed agents, and a loop with tools."""
