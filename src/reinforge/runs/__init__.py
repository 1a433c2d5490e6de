"""The run folder: its journal, checkpoints and reports, and the code that reads them."""
