"""NeMo Customizer: the adapter and the trainer of the NeMo Agent Toolkit."""
