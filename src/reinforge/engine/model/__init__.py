"""The model: loading, attention, output layer, adapters, chat template."""
