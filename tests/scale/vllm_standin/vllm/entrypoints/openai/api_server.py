"""Starts the stand-in by the command that starts vLLM; with `STANDIN_FAILS` it fails with that text."""

import os

if __name__ == "__main__":
    if failure := os.environ.get("STANDIN_FAILS"):
        raise SystemExit(failure)
    from tests.scale.vllm_server import main

    main()
