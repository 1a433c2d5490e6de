"""Examples in, scores and figures out."""
