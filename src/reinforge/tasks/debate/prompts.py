"""The role prompts that the starter is trained on; `examples/debate` uses the same ones."""

PROVER = "argue $stance: every cell is below 4: $cells"
VERIFIER = "decide: every cell is below 4: you see $seen"
HINT = "accept or reject?"
