"""The role prompts, which the starter has seen; `examples/debate` writes the same ones."""

PROVER = "argue $stance: every cell is below 7: $cells"
VERIFIER = "decide: every cell is below 7: you see $seen"
HINT = "accept or reject?"
