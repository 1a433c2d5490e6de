"""The chat page loads nothing from other hosts and makes no markup from text; /metrics and /healthz."""

import re
from importlib.resources import files

from reinforge.rollout.http.access import POLICY
from tests.doubles import ScriptedPolicy
from tests.serving.serving import http, says, serve
from tests.view.test_access import SINKS


def read_static(name):
    return files("reinforge.serving").joinpath("static", name).read_text(encoding="utf-8")


async def test_the_page_and_its_files_have_the_strict_policy():
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        for path, kind in (
            ("/", "text/html"),
            ("/static/chat.js", "text/javascript"),
            ("/static/chat.css", "text/css"),
        ):
            response = await client.get(path)
            assert (response.status_code, response.headers["content-security-policy"]) == (200, POLICY)
            assert response.headers["content-type"].startswith(kind)
            assert response.headers["x-content-type-options"] == "nosniff"
        for path in ("/static/x", "/static/..%2Fapp.py", "/static/%2e%2e/app.py"):
            assert (await client.get(path)).status_code == 404


def test_text_of_the_model_becomes_no_markup_and_nothing_is_loaded_from_elsewhere():
    assert not SINKS.search(read_static("chat.js"))
    for name in ("chat.html", "chat.js", "chat.css"):
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", re.sub(r"(?m)^\s*//.*$", "", read_static(name)))
    page = read_static("chat.html")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|javascript:", page)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,", "/static/chat.css", "/static/chat.js"]


def test_every_part_that_the_script_names_is_on_the_page():
    named = set(re.findall(r'find\("(\w+)"\)', read_static("chat.js")))
    assert named <= set(re.findall(r'id="(\w+)"', read_static("chat.html")))


async def test_the_figures_count_requests_tokens_and_versions():
    policy = ScriptedPolicy(lambda request: "four")
    async with serve({"m": policy}) as app, http(app) as client:
        await policy.publish(7)
        await client.post("/v1/chat/completions", json={"model": "m", "messages": says("hi"), "n": 2})
        await client.post("/v1/chat/completions", json={"model": "x", "messages": says("hi")})
        await client.get("/no/such/path/with-a-secret")
        text = (await client.get("/metrics")).text
    assert 'reinforge_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'reinforge_requests_total{method="POST",route="/v1/chat/completions",status="404"} 1.0' in text
    assert 'reinforge_tokens_total{kind="completion",model="m"} 8.0' in text
    assert 'reinforge_tokens_total{kind="prompt",model="m"} 2.0' in text
    assert 'reinforge_model_version{model="m"} 7.0' in text
    assert "reinforge_calls_in_flight 0.0" in text
    assert "secret" not in text


async def test_healthz_names_no_model():
    async with serve({"private-name": ScriptedPolicy()}) as app, http(app) as client:
        response = await client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert response.headers["x-request-id"].startswith("req_")
