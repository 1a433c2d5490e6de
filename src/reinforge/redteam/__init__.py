"""Stress testing: an attacker is trained against a target so that it finds likely, natural failures."""
