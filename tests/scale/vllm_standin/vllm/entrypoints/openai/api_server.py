"""Starts the stand-in by the command that starts vLLM."""

from tests.scale.vllm_server import main

if __name__ == "__main__":
    main()
