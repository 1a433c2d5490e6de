"""Any requests to `reinforge serve` with all of its features are answered or refused, and harm no other client."""

import json
import re
import socket
from contextlib import suppress
from urllib.parse import quote

import httpx
import pytest
from hypothesis import strategies as st

from tests.fuzz.fuzzing import TEXTS, damage, fuzzed
from tests.fuzz.test_gateway_requests import HEADERS, METHODS, PATHS, TOOLS, USER, requests, write_json
from tests.protocols.art_client import DESCRIBED, MADE_UP, build_call
from tests.protocols.fine_tuning import serve_tiny_model, supervised_rows, to_jsonl
from tests.protocols.test_graders import SCORE_MODEL, similarity, string_check
from tests.protocols.test_sessions import KEY, OPEN, job
from tests.protocols.tinker import CONTENT_TYPE, build_body

HONEST = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 12}
ROWS = {"file": ["rows.jsonl", to_jsonl(supervised_rows(4)).decode()], "purpose": [None, "fine-tune"]}
TUNED = {"model": "tiny", "training_file": "<file>", "seed": 1, "suffix": "a", "metadata": {"a": "b"}}
PARAMETERS = {"hyperparameters": {"n_epochs": 1, "batch_size": 2, "learning_rate_multiplier": "auto"}}
ASKED = {"request": {"messages": USER, "sampling": {"max_tokens": 4, "top_p": 0.9, "seed": 1}, "tools": TOOLS[:1]}}
GROUPS = {"trajectory_groups": [{"trajectories": MADE_UP}], "experimental_config": {"learning_rate": 1e-3}}
NEXT, OWN = {"model_id": "<train>", "seq_id": "<seq>"}, {"session_id": "<tinker>"}
DATUM = [[5, 6, 7], {"target_tokens": [6, 7, 8], "logprobs": [-1.0] * 3, "advantages": [0.0, 1.0, -1.0]}]
GRADIENT = {**NEXT, "data": [DATUM, DATUM], "loss": "ppo", "config": {}, "forward_only": False}
LORA = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
SAMPLE = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 4, "seed": 1, "stop": ["a"]}}
WAIT, JOBS = ("retrieve_future", {"request_id": "<future>"}), "/v1/fine_tuning/jobs"
ONE, ART = "/reinforge/v1/sessions/<session>", "/v1/preview/models"
REQUESTS = {
    "files": [
        ("POST /v1/files", ROWS), "GET /v1/files", "GET /v1/files/<file>", "GET /v1/files/<file>/content",
        ("POST /v1/uploads", {"bytes": 4, "filename": "a", "purpose": "fine-tune", "expires_after": {}}),
        ("POST /v1/uploads/<upload>/parts", {"data": ["a", "1234"]}), ("POST /v1/uploads/<upload>/cancel", {}),
        ("POST /v1/uploads/<upload>/complete", {"part_ids": ["<part>"]}), "DELETE /v1/files/<file>",
    ],
    "jobs": [
        ("POST /v1/files", ROWS), (f"POST {JOBS}", {**TUNED, **PARAMETERS}), f"GET {JOBS}",
        *((f"POST {JOBS}", {**TUNED, "method": {"type": kind, kind: {**PARAMETERS, **given}}}) for kind, given in (
            ("supervised", {}), ("dpo", {}), ("reinforcement", {"grader": string_check()}))),
        *((f"POST {JOBS}/<ftjob>/{verb}", {}) for verb in ("cancel", "pause", "resume")), f"GET {JOBS}/<ftjob>",
        f"GET {JOBS}/<ftjob>/checkpoints", f"GET {JOBS}/<ftjob>/events",
        "GET /v1/models", "DELETE /v1/models/ft:tiny", "GET /v1/fine_tuning/checkpoints/a/permissions",
    ],
    "graders": [
        (f"POST /v1/fine_tuning/alpha/graders/{verb}", {"grader": each, "model_sample": "a b", "item": {"answer": "a"}})
        for verb in ("run", "validate") for each in (
            string_check(), similarity("rouge_l"), similarity("fuzzy_match"), {**SCORE_MODEL, "model": "tiny"},
            {"type": "multi", "name": "m", "calculate_output": "a / 2", "graders": {"a": similarity("bleu")}},
            {"type": "python", "name": "p", "source": "def grade(sample, item): return 0.5"})
    ],
    "sessions": [
        ("POST /reinforge/v1/sessions", OPEN), f"GET {ONE}", (f"POST {ONE}/sample", ASKED), f"GET {ONE}/fingerprint",
        (f"POST {ONE}/score", {"token_ids": [[1, 2, 3]]}), (f"POST {ONE}/jobs", job()), f"GET {ONE}/jobs?job_key=r/0",
        (f"POST {ONE}/encode", {**ASKED, "reply": {"role": "assistant", "content": "a"}}), f"DELETE {ONE}",
        (f"POST {ONE}/publish", {"version": 1}), (f"PUT {ONE}/saves/{KEY}", {"version": 1, "keep": ["<session>/a"]}),
        (f"POST {ONE}/restore", {"session": "<session>", "save": KEY, "version": 1}),
    ],
    "art": [
        (f"POST {ART}", {**DESCRIBED, "return_existing": True}), ("POST /register", DESCRIBED),
        ("POST /v1/preview/training-jobs", {"model_id": "<model>", **GROUPS}), f"DELETE {ART}/<model>",
        "GET /v1/preview/training-jobs/<job>/events", f"GET {ART}/<model>/checkpoints",
        (f"DELETE {ART}/<model>/checkpoints", {"steps": [1]}), ("POST /v1/preview/sft-training-jobs", {}),
        ("POST /_delete_checkpoint_files", {"model": DESCRIBED, "steps_to_keep": [1]}),
        ("POST /_prepare_backend_for_training", {"model": DESCRIBED}), ("POST /_get_step", DESCRIBED),
        ("POST /_train_model", build_call(MADE_UP)),
    ],
    "tinker": [
        ("create_session", {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"}),
        ("create_model", {**OWN, "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}), WAIT,
        WAIT, WAIT, ("forward_backward", GRADIENT), ("forward_backward", {**GRADIENT, "loss": "cispo"}),
        ("optim_step", {**NEXT, "adam_params": ADAM}), ("save_weights_external", {**NEXT, "path": "a"}),
        ("save_weights", {**NEXT, "path": "a", "ttl_seconds": 60, "overwrite": True}),
        ("save_weights_for_sampler", {**NEXT, "sampling_session_seq_id": 1, "kind": "inflight"}),
        ("save_weights_for_sampler", {**NEXT, "path": "s", "user_metadata": {"a": "b"}}), WAIT, WAIT,
        ("load_weights", {**NEXT, "path": "<checkpoint>", "optimizer": True}), ("get_info", {"model_id": "<train>"}),
        ("load_weights", {**OWN, "model_seq_id": 1, "path": "<checkpoint>", "optimizer": False}),
        *[("create_sampling_session", {**OWN, "sampling_session_seq_id": number, **weights}) for number, weights in (
            (2, {"base_model": "tiny"}), (3, {"model_path": "<checkpoint>"}))],
        ("asample", {**SAMPLE, "sampling_session_id": "<sample>", "seq_id": 1, "num_samples": 2,
                     "prompt_logprobs": True, "topk_sample_logprobs": 2}),
        ("cancel_future", WAIT[1]), ("weights_info", {"tinker_path": "<checkpoint>"}),
        ("join_sampling_session", {"sampling_session_id": "<sample>"}),
        ("session_heartbeat", OWN), ("telemetry", OWN), ("sessions/<tinker>/finish", {"detail": "a"}),
        *[f"GET /api/v1/{path}" for path in ("get_server_capabilities", "samplers/<sample>", "sessions/<tinker>",
          "training_runs/<train>", "training_runs", "training_runs/<train>/checkpoints", "checkpoints", "sessions")],
        "DELETE /api/v1/training_runs/<train>/checkpoints/weights/a",
    ],
}  # fmt: skip
"""What the clients of each protocol send; a path alone is one of Tinker's."""
CLEANUP = {r"ftjob-\w+": f"POST {JOBS}/<ftjob>/cancel", r"model-\w+": f"DELETE {ART}/<model>",
           r"\w{32}": f"DELETE {ONE}", r"\w{16}": "sessions/<tinker>/finish"}  # fmt: skip
ID = re.compile(r'"((?:file|upload|part|ftjob|model|job)-\w{24}|[0-9a-f]{32}|[0-9a-f]{16}[\w:]*|tinker://[\w:/.-]+)"')
KINDS = {"session": r"\w{32}", "tinker": r"\w{16}", "train": r"\w+:train:\d+", "sample": r"\w+:sample:\d+",
         "future": r"\w+:\w+:\d+:\d+", "checkpoint": "tinker:.+"}  # fmt: skip
"""What `<session>` and the like stand for, of the ids in the answers so far; `<file>` and the like: `file-...`."""

PATIENCE_S = 60
"""How long a client waits that does not hang up: the server may still work on what the others sent."""


class Clients:
    """Clients of one server, which know each other's ids."""

    def __init__(self, url, folder):
        self.folder, self.ids, self.http = folder, [], httpx.Client(base_url=url.removesuffix("/v1"), timeout=5)
        self.honest = self.ask_honestly()

    def ask_honestly(self):
        answer = self.http.post("/v1/chat/completions", json=HONEST, timeout=PATIENCE_S)
        return answer.json()["choices"][0]["message"]["content"]

    def fill(self, text, at):
        """Returns a text with ids in place of their names: the newest of each kind, or one `at` before it."""

        def find(name):
            kind = KINDS.get(name[1] or "train", rf"{name[1]}-\w+")
            ids = [each for each in self.ids if re.fullmatch(kind, each)] or ["none"]
            found = ids[-1 - at % len(ids)]
            return found if name[1] else str(sum(each.startswith(f"{found}:") for each in self.ids))

        return re.sub(r'"<seq>"|<(\w+)>', find, text)

    def send(self, place, body=None, at=0, odd=None):
        """Sends a request, and checks and reads its answer; `odd` stands in its path in place of an id."""
        method, path = place.split() if " " in place else ("POST", f"/api/v1/{place}")
        path = self.fill(path, at) if odd is None else re.sub(r"<\w+>", odd, path)
        sent = {} if body is None else write_body(path, body, self.fill(write_json(body).decode(), at))
        with suppress(httpx.ReadTimeout, httpx.RemoteProtocolError):  # the client or ART's stream hangs up
            answer = self.http.request(method, path, **sent)
            self.check(answer.status_code, answer.text, f"{method} {path[:500]} {str(sent)[:3000]}")
            self.ids += [each for each in ID.findall(answer.text) if each not in self.ids]

    def send_bytes(self, text):
        server = self.http.base_url
        with socket.create_connection((server.host, server.port), PATIENCE_S) as connection:
            connection.sendall(text.replace("{host}", f"{server.host}:{server.port}").encode("utf-8", "surrogatepass"))
            connection.shutdown(socket.SHUT_WR)
            if answer := b"".join(iter(lambda: connection.recv(1 << 16), b"")):
                self.check(int(answer.split()[1]), answer.decode("utf-8", "replace"), text)

    def check(self, status, text, what):
        assert status < 500 or status in (501, 503, 529), f"{what}: {text}"
        leaks = (r"File \"/", "src/reinforge", f"{self.folder}/data", '"category": "server"', '"text":"sampling: ')
        assert not any(each in text for each in leaks), f"{what}: {text}"

    def check_server(self):
        """Checks that the server is healthy and its model unchanged, and removes what the requests have made."""
        assert self.http.get("/healthz", timeout=PATIENCE_S).status_code == 200
        assert self.ask_honestly() == self.honest
        log = (self.folder / "serve.log").read_text()
        assert not re.search("Traceback|never retrieved", log), log[-9000:]
        for id_ in list(self.ids):
            for kind in (kind for kind in CLEANUP if re.fullmatch(kind, id_)):
                self.send(CLEANUP[kind], {}, odd=id_)
        del self.ids[:-9]  # the next requests may use what is gone


def write_body(path, body, text):
    with suppress(Exception):  # what no form and no message of the SDK can hold is sent as JSON
        if path.endswith(("/files", "/parts")):
            return {"files": {name: (str(file), part.encode()) for name, (file, part) in body.items()}}
        if path.endswith("forward_backward"):
            message = build_body(*(json.loads(text)[name] for name in GRADIENT))
            return {"content": message, "headers": {"content-type": CONTENT_TYPE}}
    return {"content": text.encode(), "headers": {"content-type": "application/json"}}


@st.composite
def streams(draw):
    """Draws requests of one protocol in any order, some of them with parts that are wrong."""
    family = REQUESTS[draw(st.sampled_from(sorted(REQUESTS)))]
    chosen = family[:3] + draw(st.lists(st.sampled_from(family), min_size=1, max_size=10))
    for number, request in enumerate(chosen):
        place, body = request if isinstance(request, tuple) else (request, None)
        at, odd = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 5])), None
        if number > 2 and draw(st.booleans()):
            odd = None if body else quote(draw(ODD_IDS).encode("utf-8", "surrogatepass"), safe="")
            body = body and draw(damage(body))
        chosen[number] = (place, body, at, odd)
    return chosen


ODD_IDS = TEXTS | st.sampled_from(["..", "../../../etc/passwd", "a" * 3000, "%2e%2e%2f", "file-" + "0" * 24])
PLACES = st.tuples(st.sampled_from(METHODS), PATHS).map(" /".join)
HEADS = st.tuples(PLACES, HEADERS.map(lambda named: map(": ".join, {"host": "{host}", **named}.items()))).map(
    lambda head: "\r\n".join([f"{head[0]} HTTP/1.1", *head[1], "", ""])
)


@pytest.mark.slow
def test_no_requests_harm_other_clients(tmp_path):
    chats = st.lists(requests("tiny").map(lambda chat: (f"POST /v1{chat[0]}", chat[1])), min_size=1, max_size=5)
    with serve_tiny_model(tmp_path, "--sessions", "--art", "--tinker", "--allow_python_graders") as url:
        clients = Clients(url, tmp_path)

        @fuzzed(streams() | chats, st.lists(HEADS | TEXTS | st.tuples(HEADS, TEXTS).map("".join), max_size=4), quick=10)
        def check(stream, texts):
            for request in stream:
                clients.send(*request)
            for text in texts:
                clients.send_bytes(text)
            clients.check_server()

        check()
