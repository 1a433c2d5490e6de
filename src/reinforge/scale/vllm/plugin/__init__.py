"""What runs in vLLM's environment: put this folder on its PYTHONPATH. Nothing here imports reinforge."""
