"""Reads long bodies in a process of lower priority, since in this one Python's lock would stop all other clients.

await reader.read(read_call, body, "/v1/messages", kind=TypeAdapter(Call))     as read_call(body, "/v1/messages")
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from reinforge.bounded import load_json
from reinforge.dialects.chat_call import BadRequest
from reinforge.rollout.http.exchange import SHORT_BODY, describe_failure, encode_body

T = TypeVar("T")
READ_S, IDLE_S = 30.0, 10.0  # seconds for one body, and without one, after which the process is killed


class BodyReader:
    """One process, which starts with the first long body; the bodies of all clients wait for it in their order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "read-body")
        self._process: subprocess.Popen[bytes] | None = None
        self._used_s = 0.0  # when it was used last

    async def read(
        self, work: Callable[..., T], body: bytes, *arguments: Any, kind: TypeAdapter[T], short: int = SHORT_BODY
    ) -> T:
        """Returns `work(body, *arguments)`, of the type `kind`; up to `short` bytes are read in this process."""
        if len(body) <= short:
            return work(body, *arguments)
        head = [work.__module__, work.__qualname__, arguments, len(body)]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: kind.validate_python(self._ask(head, body)))

    async def rest(self) -> None:
        """Ends the process if it is not used, so that its memory returns."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end, IDLE_S)

    async def close(self) -> None:
        if self._process is not None:
            self._process.kill()
        await asyncio.to_thread(self._thread.shutdown)
        self._end()

    def _ask(self, head: list[Any], body: bytes) -> Any:
        if self._process is None:
            command, pipe = [sys.executable, "-P", "-m", __name__], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        process: Any = self._process
        late = threading.Timer(READ_S, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(head).encode() + b"\n" + body)
            process.stdin.flush()
            answer = load_json(process.stdout.read(int(process.stdout.readline())))
        except (OSError, ValueError):  # it was killed
            self._end()
            raise BadRequest("the body takes too much time to be read", status=413, code="request_too_large") from None
        finally:
            late.cancel()
            self._used_s = time.monotonic()
        if "refusal" in answer:
            raise BadRequest(**answer["refusal"])
        return answer["value"]

    def _end(self, unused_s: float = 0.0) -> None:
        if self._process is not None and time.monotonic() - self._used_s >= unused_s:
            process, self._process = self._process, None
            process.kill()
            process.communicate()


def main() -> None:
    import_module("reinforge.serving.chat")  # at full speed: a client waits for it
    if hasattr(os, "nice"):
        os.nice(10)  # about a tenth of a core that sampling needs as well: its threads wait for the slowest
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed is not an answer
    while line := source.readline():
        module, name, arguments, length = json.loads(line)
        try:
            value = getattr(import_module(module), name)(source.read(length), *arguments)
            text = encode_body({"value": to_jsonable_python(value)})
        except Exception as error:  # noqa: BLE001  the client is told
            found = describe_failure(error, name)
            named = {each: getattr(found, each) for each in ("message", "param", "status", "code")}
            text = encode_body({"refusal": named})
        target.write(b"%d\n%b" % (len(text), text))
        target.flush()


if __name__ == "__main__":
    main()
