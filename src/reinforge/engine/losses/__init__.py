"""Losses by name: policy-gradient losses and preference losses."""
