"""Which requests a small model answers and which go to its teacher, at a quality that is promised with statistics."""
