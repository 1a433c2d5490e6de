"""Whatever reaches the gateway is answered, in the form of its API, and no other episode notices."""

import asyncio
import json

import pytest

from reinforge.limits import Limits
from reinforge.rollout import gateway as server
from reinforge.rollout.gateway import Gateway
from reinforge.rollout.http import gateway_access
from tests.gateway import CHAT, Episode, HeldPolicy, ask, open_connection, read_response, write_request

MESSAGES = {**CHAT, "max_tokens": 9}


@pytest.fixture
async def episode():
    return Episode(entries=("agent", "judge"))


@pytest.fixture
async def access(gateway, episode):
    """The access of an episode; afterwards another one is as well as before."""
    other = Episode()
    with gateway.attach(other.endpoint) as untouched, gateway.attach(episode.endpoint) as access:
        yield access
        assert (await ask(untouched))[0] == 200
        assert len(other.capture.calls) == 1
    assert episode.capture.pending == 0


@pytest.mark.parametrize(
    ("body", "expected", "reason"),
    [
        (b'{"model": "\xff"}', 400, "not UTF-8"),
        (b"[" * 100_000, 400, "nested"),
        ({**CHAT, "model": "gpt"}, 404, "llms has: agent, judge"),
    ],
)
async def test_a_bad_body_is_refused_with_its_reason(access, episode, body, expected, reason):
    """Every other one is in the tests of the endpoint."""
    status, headers, answer = await ask(access, body)
    assert status == expected
    assert reason in json.loads(answer)["error"]["message"]
    assert headers["x-should-retry"] == "false"
    assert episode.capture.calls == []


async def test_a_body_that_is_too_long_is_refused_before_it_is_read(access):
    status, headers, body = await ask(access, b"", content_length=50_000_000)
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["error"]["code"] == "request_too_large"


async def send_more_than_the_limit(access):
    """Sends a body of unknown length that is longer than the limit; returns the status."""
    reader, writer = await open_connection(access)
    writer.write(write_request(access, b"", content_length=None, transfer_encoding="chunked"))
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    for _ in range(Limits().request_bytes // 0x100000 + 1):
        writer.write(piece)
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    status, _, _ = await read_response(reader)
    writer.close()
    return status


async def test_a_body_of_unknown_length_is_read_up_to_the_limit(access):
    assert await send_more_than_the_limit(access) == 413


async def test_without_the_limit_the_body_is_read_whole(episode):
    """Mutation check: 400, since 33 MiB of spaces were read and are no JSON."""
    async with Gateway(max_body_bytes=1 << 40) as gateway:
        with gateway.attach(episode.endpoint) as access:
            assert await send_more_than_the_limit(access) == 400


async def test_a_client_may_ask_before_it_sends_its_body(access):
    reader, writer = await open_connection(access)
    content = json.dumps(CHAT).encode()
    writer.write(write_request(access, b"", content_length=len(content), expect="100-continue"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(content)
    assert (await read_response(reader))[0] == 200
    writer.close()


async def test_a_slow_body_is_given_up(episode, monkeypatch):
    monkeypatch.setattr(server, "LINGER_S", 0.02)
    async with Gateway(body_timeout_s=0.02) as gateway:
        with gateway.attach(episode.endpoint) as access:
            status, _, body = await ask(access, b"", content_length=100)
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


async def test_a_slow_head_is_given_up(episode, monkeypatch):
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.02)
    async with Gateway() as gateway:
        with gateway.attach(episode.endpoint) as access:
            reader, writer = await open_connection(access)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ")
            assert await reader.read() == b""
            writer.close()


@pytest.mark.parametrize("num_sent", [30, -30])
async def test_without_the_time_limits_a_slow_client_is_waited_for(episode, monkeypatch, num_sent):
    """Mutation check: a request whose head, or whose body, takes longer than the limits above is still answered."""
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 3600.0)
    async with Gateway(body_timeout_s=3600.0) as gateway:
        with gateway.attach(episode.endpoint) as access:
            reader, writer = await open_connection(access)
            content = write_request(access)
            writer.write(content[:num_sent])
            await asyncio.sleep(0.1)
            writer.write(content[num_sent:])
            assert (await read_response(reader))[0] == 200
            writer.close()


async def test_a_client_that_hangs_up_while_it_sends_leaves_nothing(access, episode, caplog):
    _, writer = await open_connection(access)
    writer.write(write_request(access, b"{", content_length=100))
    await writer.drain()
    writer.transport.abort()
    assert (await ask(access))[0] == 200
    assert len(episode.capture.calls) == 1
    assert not caplog.records


async def test_bytes_that_are_no_http_are_refused_without_a_traceback_in_the_log(access, caplog):
    reader, writer = await open_connection(access)
    writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    writer.close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("path", "expected", "code"),
    [
        ("/episodes/0123456789abcdef/v1/chat/completions", 404, "episode_not_found"),
        ("/v1/files", 404, "not_found"),
        ("/v1/../v1/files", 404, "not_found"),
        ("/v1/models/nothing", 405, "method_not_allowed"),
    ],
)
async def test_a_path_that_is_not_there(access, path, expected, code, caplog):
    for _ in range(2):
        status, _, body = await ask(access, path=path)
        assert (status, json.loads(body)["error"]["code"]) == (expected, code)
    told = [record.message.split(" here")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert told == ([f"POST {path}: there is no POST {path}"] if code == "not_found" else []), "once in a run"


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("key", [None, "Bearer", "Bearer sk-episode-wrong", "Basic YTpi", "Bearer \udcff"])
async def test_a_wrong_key_is_refused(access, episode, path, key):
    status, _, body = await ask(access, path=path, authorization=key)
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    assert episode.capture.calls == []


async def test_the_key_of_one_episode_opens_no_other(gateway, access, episode):
    with gateway.attach(Episode().endpoint) as other:
        status, _, _ = await ask(access, authorization=f"Bearer {other.api_key}")
    assert status == 401
    assert episode.capture.calls == []


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
async def test_an_episode_that_has_ended_is_told_to_its_clients_only(gateway, path):
    episode = Episode()
    with gateway.attach(episode.endpoint) as access:
        pass
    status, _, body = await ask(access, path=path)
    assert (status, json.loads(body)["error"]["code"]) == (410, "episode_ended")
    assert (await ask(access, path=path, authorization="Bearer wrong"))[0] == 401
    assert episode.capture.calls == []


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
async def test_without_closing_its_door_the_key_of_an_ended_episode_samples(gateway, monkeypatch, path):
    """Mutation check."""
    monkeypatch.setattr(gateway_access.GatewayAccess, "close", lambda self: None)
    episode = Episode()
    with gateway.attach(episode.endpoint) as access:
        pass
    assert (await ask(access, path=path))[0] == 200
    assert len(episode.capture.calls) == 1


async def test_the_latest_ended_episodes_are_remembered(gateway, monkeypatch):
    monkeypatch.setattr(server, "MAX_ENDED", 2)
    accesses = [gateway.attach(Episode().endpoint) for _ in range(3)]
    for access in accesses:
        access.close()
    assert [(await ask(access))[0] for access in accesses] == [404, 410, 410]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1"},
        {"host": None},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
    ],
)
async def test_a_page_in_a_browser_gets_nothing(access, episode, headers):
    status, answered, _ = await ask(access, **headers)
    assert status in (400, 403)  # 400: HTTP itself requires the Host header
    assert not any(name.startswith("access-control") for name in answered)
    assert episode.capture.calls == []


async def test_options_names_the_methods_and_allows_no_page(access):
    status, headers, _ = await ask(access, b"", method="OPTIONS")
    assert (status, headers["allow"]) == (204, "get, head, options, post")
    assert not any(name.startswith("access-control") for name in headers)


async def test_head_is_get_without_the_body(access):
    _, got, _ = await ask(access, b"", method="GET", path="/models")
    status, headers, _ = await ask(access, b"", method="HEAD", path="/models")
    assert (status, headers["content-length"]) == (200, got["content-length"])
    assert (await ask(access, b"", method="DELETE", path="/models"))[0] == 405


async def test_anthropics_clients_get_errors_in_their_form(access):
    for headers, path, kind in (
        ({"authorization": "Bearer wrong"}, "/messages", "authentication_error"),
        ({"host": "evil.example"}, "/messages", "permission_error"),
        ({}, "/messages/count_tokens", "not_found_error"),
    ):
        _, _, body = await ask(access, MESSAGES, path=path, **headers)
        assert (json.loads(body)["type"], json.loads(body)["error"]["type"]) == ("error", kind)


def accept_every_key(monkeypatch):
    monkeypatch.setattr(gateway_access.GatewayAccess, "accepts", lambda self, key: True)


def check_no_origin(monkeypatch):
    monkeypatch.setattr(Gateway, "_check_origin", lambda self, request: None)


@pytest.mark.parametrize(
    ("mutate", "headers"),
    [
        (accept_every_key, {"authorization": "Bearer wrong"}),
        (check_no_origin, {"host": "evil.example"}),
        (check_no_origin, {"origin": "https://evil.example"}),
    ],
)
async def test_without_the_check_a_stranger_samples(access, episode, monkeypatch, mutate, headers):
    mutate(monkeypatch)
    assert (await ask(access, **headers))[0] == 200
    assert len(episode.capture.calls) == 1


async def test_one_episode_with_all_its_requests_in_flight_delays_no_other(gateway, set_limit):
    set_limit("calls_in_flight", 2)
    busy, calm = Episode(HeldPolicy()), Episode()
    with gateway.attach(busy.endpoint) as busy_door, gateway.attach(calm.endpoint) as calm_door:
        asking = [asyncio.create_task(ask(busy_door)) for _ in range(10)]
        await busy.policy.asked.wait()
        assert (await ask(calm_door))[0] == 200
        busy.policy.release.set()
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
