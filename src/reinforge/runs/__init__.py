"""The run folder: its journal, checkpoints and reports, and what reads them."""
