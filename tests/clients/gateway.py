"""Runs schemathesis against the gateway: `python -m tests.clients.gateway SCHEMATHESIS [arguments of its own]`.

It makes requests from `tests/data/gateway_openapi.yml`, good ones and bad ones; none may be answered with a 5xx.
"""

import asyncio
import sys
from pathlib import Path

from reinforge.rollout.gateway import Gateway
from tests.doubles import ScriptedPolicy
from tests.gateway import Episode

DESCRIPTION = Path(__file__).parents[1] / "data" / "gateway_openapi.yml"


async def main(program: str, *arguments: str) -> int:
    episode = Episode(ScriptedPolicy(lambda request: "four"))
    async with Gateway() as gateway:
        with gateway.attach(episode.endpoint) as access:
            command = [program, "run", str(DESCRIPTION), "--url", gateway.origin, "--checks", "not_a_server_error"]
            command += ["--header", f"Authorization: Bearer {access.api_key}", "--seed", "0", *arguments]
            process = await asyncio.create_subprocess_exec(*command)
            code = await process.wait()
    print(f"  ok: {len(episode.capture.calls)} calls were sampled")  # noqa: T201
    return code or (0 if episode.capture.calls else 1)


sys.exit(asyncio.run(main(*sys.argv[1:])))
