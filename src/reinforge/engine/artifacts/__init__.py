"""Models written for other programs: adapters merged into their base, and GGUF files."""
