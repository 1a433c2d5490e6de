"""What keeps an agent or evaluator from harming the run: threads, limits, and worker processes."""
