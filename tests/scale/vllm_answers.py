"""Calls whose answers a real vLLM server has given, recorded by `make vllm`; the stand-in gives the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reinforge.rollout.models.openai_http import OpenAIEndpoint

ANSWERS = Path(__file__).parents[1] / "data" / "vllm_answers.json"
SETTINGS = {"temperature": 1.0, "seed": 1, "max_tokens": 3, "stop_token_ids": [1], "logprobs": 2, "detokenize": False}


def list_calls(folder: str) -> list[tuple[str, str, Any]]:
    """Returns the calls: name, `METHOD PATH`, and body.

    Args:
        folder: Weights of all of the model's parameters, which the server can read.
    """
    generate = {"model": "policy", "token_ids": [7, 8, 9], "return_token_ids": True, "sampling_params": SETTINGS}
    long = {**generate, "token_ids": [7] * 300}
    return [
        ("version", "GET /version", None),
        ("models", "GET /v1/models", None),
        ("generate", "POST /inference/v1/generate", generate),
        ("generate another model", "POST /inference/v1/generate", {**generate, "model": "missing"}),
        ("generate from a long prompt", "POST /inference/v1/generate", long),
        ("pause", "POST /pause?mode=wait", None),
        ("reload", "POST /collective_rpc", {"method": "reinforge_reload_weights", "args": [folder]}),
        ("unknown method", "POST /collective_rpc", {"method": "missing", "args": [folder]}),
        ("reset", "POST /reset_prefix_cache", None),
        ("label", "POST /update_weight_version", {"new_version": "a-1"}),
        ("resume", "POST /resume", None),
        ("labeled", "GET /weight_info", None),
        ("generate again", "POST /inference/v1/generate", generate),
    ]


async def call_server(endpoint: OpenAIEndpoint, folder: str) -> dict[str, Any]:
    """Returns status and answer of each call."""
    found = {}
    for name, call, body in list_calls(folder):
        method, _, path = call.partition(" ")
        async with endpoint._get_session().request(method, endpoint.url + path, json=body) as response:
            text = await response.text()
            try:
                answer = json.loads(text)
            except ValueError:
                answer = text
            found[name] = {"call": call, "status": response.status, "answer": answer}
    return found


async def record_answers(endpoint: OpenAIEndpoint, folder: Path, model: Path) -> None:
    """Writes what a real server answers, without the paths of this machine."""
    answers = json.dumps(await call_server(endpoint, str(folder)), indent=1, sort_keys=True)
    for place in (folder, folder.parent.parent, model):
        answers = answers.replace(str(place), "FOLDER")
    ANSWERS.write_text(answers + "\n")
