"""The stand-in in the place of vLLM: see tests/scale/vllm_server.py."""
