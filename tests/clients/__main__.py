"""Runs the official OpenAI client against the stand-in: `python -m tests.clients PYTHON_WITH_THE_CLIENT`."""

import subprocess
import sys
from pathlib import Path

from tests.openai_server import fails
from tests.openai_service import OpenAIService

with OpenAIService() as service:
    service.faults["create"] = [fails(503)]
    script = Path(__file__).with_name("openai_sdk.py")
    done = subprocess.run([sys.argv[1], str(script), service.url, service.key], timeout=120, check=False)
sys.exit(done.returncode)
