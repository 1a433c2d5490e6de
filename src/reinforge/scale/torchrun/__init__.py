"""The processes that torchrun starts."""
