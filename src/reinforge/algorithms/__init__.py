"""Which tokens earn which credit, and the name of the loss; no tensors here."""
