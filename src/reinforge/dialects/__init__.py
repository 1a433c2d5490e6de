"""How model families and services write the same thing."""
