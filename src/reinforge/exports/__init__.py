"""The model of a run for other programs: a folder, an adapter or a GGUF file, judged again and with a model card."""
