"""The role prompts, which the starter has seen; `examples/debate` writes the same ones."""

PROVER = "argue $stance: every cell is below $limit: $cells"
VERIFIER = "decide: every cell is below $limit: you see $seen"
HINT = "accept or reject?"
