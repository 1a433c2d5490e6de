"""The stand-in in the place of vLLM: see tests/vllm_server.py."""
