"""A server that speaks OpenEnv's protocol: guess a number below 4; `python openenv_server.py PORT` prints its address.

What an action is, the first part of the path says: `/words/schema`; without one it is a number.
"""

import json
import os
import sys
from functools import partial

from aiohttp import web

NUMBER = {"properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["guess"]}
WORDS = {"properties": {"word": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["word"]}
PAIR = {"properties": {"guess": {"type": "integer"}, "why": {"type": "string"}}, "required": ["guess", "why"]}
SCHEMAS = {"number": NUMBER, "words": WORDS, "pair": PAIR}
OPEN = set()


def find_schema(request):
    return SCHEMAS[request.match_info.get("schema", "number")]


def answer(text, reward=None, done=False):
    return {"type": "observation", "data": {"observation": {"text": text, "left": []}, "reward": reward, "done": done}}


async def play(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    if OPEN:
        await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1 sessions"}})
        return socket
    OPEN.add(socket)
    try:
        async for message in socket:
            given = json.loads(message.data)
            if given["type"] == "reset":
                number, guesses = given["data"]["seed"] % 4, 0
                await socket.send_json(answer(f"guess a number below {given['data'].get('below', 4)}", 100.0))
                continue
            guess = given["data"].get("guess", given["data"].get("word"))
            if guess == 13:
                os._exit(13)
            if guess == 12:
                await socket.send_json({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no 12"}})
            elif not isinstance(guess, str if find_schema(request) is WORDS else int):
                await socket.send_json({"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "bad"}})
            else:
                guesses += 1
                await socket.send_json(answer(f"you said {guess}", float(guess == number) / 2, guesses == 2))
    finally:
        OPEN.discard(socket)
    return socket


async def schema(request):
    return web.json_response({"action": find_schema(request), "observation": {}, "state": {}})


if __name__ == "__main__":
    app = web.Application()
    for folder in ("", "/{schema}"):
        app.add_routes([web.get(f"{folder}/ws", play), web.get(f"{folder}/schema", schema)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=partial(print, flush=True))
