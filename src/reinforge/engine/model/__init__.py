"""The model: loading, attention, the output layer, adapters, the chat template."""
