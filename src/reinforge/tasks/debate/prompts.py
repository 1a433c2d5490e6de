"""The role prompts, which the starter has seen; `examples/debate` writes the same ones."""

PROVER = "argue $stance: every cell is below 4: $cells"
VERIFIER = "decide: every cell is below 4: you see $seen"
HINT = "accept or reject?"
