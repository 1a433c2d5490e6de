"""Model families, listed in `detection.py`: how each writes tool calls and reasoning, one short file a family."""
