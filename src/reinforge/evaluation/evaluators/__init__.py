"""Evaluators: each looks at an answer and returns a score."""
