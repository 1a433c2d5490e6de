"""Who may use a server: the address it listens on, its key, the Host and Origin headers."""

import stat

import pytest

from reinforge.errors import ConfigError
from reinforge.serving.access import RequestGuard, read_token
from reinforge.serving.app import ServeApp
from reinforge.serving.models import ServedModels
from tests.doubles import ScriptedPolicy
from tests.serving.serving import http, says, serve

TOKEN = "sk-reinforge-0123456789abcdef"
ASK = {"model": "m", "messages": says("hi")}


@pytest.fixture
async def guarded():
    async with serve({"m": ScriptedPolicy()}, token=TOKEN) as app:
        yield app


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gpu1.example.org"])
@pytest.mark.parametrize("token", [None, ""])
def test_an_address_that_others_can_reach_needs_a_token(host, token):
    with pytest.raises(ConfigError, match="--token_file FILE"):
        ServeApp(ServedModels(), host=host, token=token)
    ServeApp(ServedModels(), host=host, token=TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_the_loopback_needs_none(host):
    ServeApp(ServedModels(), host=host)


async def test_every_route_but_healthz_needs_the_key(guarded):
    app = guarded._runner.app
    routes = {(route.method, route.resource.canonical) for route in app.router.routes()}
    assert len(routes) > 12
    async with http(guarded) as client:
        for method, path in routes:
            expected = 200 if path == "/healthz" else 401
            assert (await client.request(method, path)).status_code == expected, path
        assert (await client.get("/no/such/route")).status_code == 401
        assert (await client.post("/v1/chat/completions", json=ASK)).json()["error"]["code"] == "invalid_api_key"


async def test_without_the_check_strangers_chat(guarded, monkeypatch):
    async with http(guarded) as client:
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 401
        monkeypatch.setattr(RequestGuard, "check", lambda self, request: None)
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


async def test_the_key_of_each_client_and_no_other(guarded):
    async with http(guarded) as client:
        for headers in ({"authorization": f"Bearer {TOKEN}"}, {"x-api-key": TOKEN}, {"api-key": TOKEN}):
            assert (await client.post("/v1/chat/completions", json=ASK, headers=headers)).status_code == 200
            assert (await client.get("/metrics", headers=headers)).status_code == 200
        for key in ("x", TOKEN[:-1], f"{TOKEN}x", "\xff", TOKEN.upper()):
            headers = {"authorization": f"Bearer {key}".encode("latin-1")}
            assert (await client.get("/v1/models", headers=headers)).status_code == 401


FOREIGN = [
    {"host": "evil.example"},
    {"host": "127.0.0.1.evil.example:80"},
    {"host": ""},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "origin": "https://evil.example"},
    {"sec-fetch-site": "same-site"},
]


async def test_a_page_of_another_site_reaches_nothing(monkeypatch):
    policy = ScriptedPolicy()
    async with serve({"m": policy}) as app, http(app) as client:
        for headers in FOREIGN:
            response = await client.post("/v1/chat/completions", json=ASK, headers=headers)
            assert response.status_code == 403, headers
            assert not any(name.startswith("access-control") for name in response.headers)
        assert policy.requests == []
        monkeypatch.setattr(RequestGuard, "_check_host", lambda self, headers: None)
        for headers in FOREIGN:
            assert (await client.post("/v1/chat/completions", json=ASK, headers=headers)).status_code == 200


PAGE = "https://chat.example.org"
CROSS = {"origin": PAGE, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
PREFLIGHT = {
    **CROSS,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_a_page_of_an_allowed_origin_may_use_the_server_with_its_key():
    policy = ScriptedPolicy()
    async with serve({"m": policy}, token=TOKEN, allowed_origins=[PAGE]) as app, http(app) as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, PAGE)
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
        assert "POST" in asked.headers["access-control-allow-methods"]
        refused = await client.post("/v1/chat/completions", json=ASK, headers=CROSS)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        for fields in ({}, {"stream": True}):
            headers = {**CROSS, "authorization": f"Bearer {TOKEN}"}
            answered = await client.post("/v1/chat/completions", json={**ASK, **fields}, headers=headers)
            assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, PAGE)
            assert "retry-after" in answered.headers["access-control-expose-headers"]
            assert (answered.headers["vary"], "access-control-allow-credentials" in answered.headers) == (
                "origin",
                False,
            )
        await client.get(f"/?key={TOKEN}")  # the cookie of the chat page is no key for other pages
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers=CROSS)).status_code == 401


async def test_pages_of_all_other_origins_stay_refused():
    async with serve({"m": ScriptedPolicy()}, allowed_origins=[PAGE]) as app, http(app) as client:
        for origin in ("https://evil.example", "http://chat.example.org", f"{PAGE}:444", "null", "*"):
            for method, headers in (("OPTIONS", PREFLIGHT), ("POST", CROSS)):
                refused = await client.request(method, "/v1/chat/completions", headers={**headers, "origin": origin})
                assert refused.status_code == 403
                assert not any(name.startswith("access-control") for name in refused.headers)
        rebound = await client.options("/v1/chat/completions", headers={**PREFLIGHT, "host": "evil.example"})
        assert rebound.status_code == 403


@pytest.mark.parametrize("origin", ["*", "null", "chat.example.org", f"{PAGE}/", f"{PAGE}/a", "https://*.example.org"])
def test_only_whole_origins_can_be_allowed(origin):
    with pytest.raises(ConfigError, match="--allowed_origins.*is not the origin of a page"):
        RequestGuard("127.0.0.1", None, allowed_origins=[PAGE, origin])


async def test_the_own_page_may_ask_and_a_link_to_it_may_be_anywhere():
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        headers = {"origin": app.address, "sec-fetch-site": "same-origin"}
        assert (await client.post("/v1/chat/completions", json=ASK, headers=headers)).status_code == 200
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get("/", headers=headers)).status_code == 200


def test_other_machines_use_an_address_or_an_allowed_name():
    guard = RequestGuard("0.0.0.0", TOKEN, ["gpu1.example.org:8000"])
    assert all(guard._is_own(name) for name in ("192.0.2.7", "2001:db8::1", "gpu1.example.org", "localhost"))
    assert not guard._is_own("evil.example")
    local = RequestGuard("127.0.0.1", None)
    assert not local._is_own("192.0.2.7")


async def test_the_page_trades_the_key_for_a_cookie(guarded):
    async with http(guarded) as client:
        assert (await client.get("/")).status_code == 401
        assert (await client.get("/?key=wrong")).status_code == 401
        traded = await client.get(f"/?key={TOKEN}&model=m")
        assert (traded.status_code, traded.headers["location"]) == (303, "/?model=m")
        cookie = traded.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", "Path=/"))
        assert (await client.get("/")).status_code == 200  # with the cookie
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == 401  # a wrong key is no help, whatever the cookies


def test_the_token_file_is_made_for_its_owner_alone(tmp_path):
    file = tmp_path / "serve.token"
    token = read_token(str(file))
    assert token.startswith("sk-reinforge-")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_token(str(file)) == token
    assert read_token(None) is None
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users of this machine can read"):
        read_token(str(file))


@pytest.mark.parametrize("content", ["", "short", "has a space in the middle of it", "é" * 20])
def test_a_token_file_without_a_good_key_is_refused(tmp_path, content):
    file = tmp_path / "serve.token"
    file.touch(0o600)
    file.write_text(content)
    with pytest.raises(ConfigError, match="no key of at least 16"):
        read_token(str(file))
