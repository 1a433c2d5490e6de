"""Losses by name: the policy-gradient family and the preference family."""
