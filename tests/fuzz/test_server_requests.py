"""Any requests to `reinforge serve` with all of its features are answered or refused, and harm no other client."""

import re
import socket
from contextlib import suppress
from urllib.parse import quote, urlsplit

import httpx
from hypothesis import strategies as st

from tests.fuzz.fuzzing import TEXTS, damage, fuzzed, to_bytes
from tests.fuzz.test_gateway_requests import HEADERS, METHODS, PATHS, TOOLS, USER, requests, write_json
from tests.protocols.art_client import DESCRIBED, MADE_UP, build_call
from tests.protocols.fine_tuning import serve_tiny_model, supervised_rows, to_jsonl
from tests.protocols.test_graders import SCORE_MODEL, similarity, string_check
from tests.protocols.test_sessions import KEY, OPEN, job
from tests.protocols.tinker import CONTENT_TYPE, build_body

HONEST = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 12}
ROWS = {"file": ["rows.jsonl", supervised_rows(4)], "purpose": "fine-tune"}
TUNED = {"model": "tiny", "training_file": "<file>", "seed": 1, "suffix": "a", "metadata": {"a": "b"}}
PARAMETERS = {"hyperparameters": {"n_epochs": 1, "batch_size": 2, "learning_rate_multiplier": "auto"}}
LABELS = {"type": "label_model", "name": "l", "model": "tiny", "labels": ["a", "b"], "passing_labels": ["a"]}
MULTI = {"type": "multi", "name": "m", "calculate_output": "a + max(b, 0.5) / 2", "graders": {"a": string_check()}}
ASKED = {"request": {"messages": USER, "sampling": {"max_tokens": 4, "top_p": 0.9, "seed": 1}, "tools": TOOLS[:1]}}
GROUPS = {"trajectory_groups": [{"trajectories": MADE_UP}], "experimental_config": {"learning_rate": 1e-3}}
NEXT, OF_SESSION = {"model_id": "<train>", "seq_id": "<seq>"}, {"session_id": "<tinker>"}
TARGETS = {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]}
PPO = {"target_tokens": [6, 7, 8], "logprobs": [-1.0] * 3, "advantages": [0.0, 1.0, -1.0]}
GRADIENT = {**NEXT, "data": [[[5, 6, 7], TARGETS]], "loss": "cross_entropy", "config": {}, "forward_only": False}
LORA = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
SAMPLE = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 4, "seed": 1, "stop": ["a"]}}
WAIT, JOBS = ("retrieve_future", {"request_id": "<future>"}), "/v1/fine_tuning/jobs"
ONE, ART = "/reinforge/v1/sessions/<session>", "/v1/preview/models"
REQUESTS = {
    "models": [
        ("POST /v1/messages/count_tokens", {"model": "tiny", "messages": USER, "tools": TOOLS[2:3], "system": "a"}),
        ("POST /v1/embeddings", {"model": "tiny", "input": "a"}), "GET /v1/models/tiny", "GET /v1/models", "GET /",
    ],
    "files": [
        ("POST /v1/files", ROWS), "GET /v1/files", "GET /v1/files/<file>", "GET /v1/files/<file>/content",
        ("POST /v1/uploads", {"bytes": 6, "filename": "a", "purpose": "fine-tune", "mime_type": "text/jsonl",
                              "expires_after": {"anchor": "created_at", "seconds": 3600}}),
        ("POST /v1/uploads/<upload>/parts", {"data": ["a", "1234"]}), ("POST /v1/uploads/<upload>/cancel", {}),
        ("POST /v1/uploads/<upload>/complete", {"part_ids": ["<part>"]}), "DELETE /v1/files/<file>",
    ],
    "jobs": [
        ("POST /v1/files", ROWS), (f"POST {JOBS}", {**TUNED, **PARAMETERS}), f"GET {JOBS}",
        *((f"POST {JOBS}", {**TUNED, "method": {"type": kind, kind: {**PARAMETERS, **given}}}) for kind, given in (
            ("supervised", {}), ("dpo", {}), ("reinforcement", {"grader": string_check()}))),
        *((f"POST {JOBS}/<ftjob>/{verb}", {}) for verb in ("cancel", "pause", "resume")), f"GET {JOBS}/<ftjob>",
        f"GET {JOBS}/<ftjob>/checkpoints", f"GET {JOBS}/<ftjob>/events",
        "DELETE /v1/models/ft:tiny", "GET /v1/fine_tuning/checkpoints/a/permissions",
    ],
    "graders": [
        (f"POST /v1/fine_tuning/alpha/graders/{verb}", {"grader": each, "model_sample": "a b", "item": {"answer": "a"}})
        for verb in ("run", "validate") for each in (
            string_check(), similarity("rouge_l"), similarity("bleu"), similarity("fuzzy_match"), MULTI,
            {**SCORE_MODEL, "model": "tiny"}, {**LABELS, "input": SCORE_MODEL["input"]},
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
        (f"POST {ART}", {**DESCRIBED, "return_existing": True}), ("POST /register", DESCRIBED), f"DELETE {ART}/<model>",
        ("POST /v1/preview/training-jobs", {"model_id": "<model>", **GROUPS}), ("POST /_get_step", DESCRIBED),
        "GET /v1/preview/training-jobs/<job>/events", f"GET {ART}/<model>/checkpoints",
        (f"DELETE {ART}/<model>/checkpoints", {"steps": [1]}), ("POST /v1/preview/sft-training-jobs", {}),
        ("POST /_delete_checkpoint_files", {"model": DESCRIBED, "steps_to_keep": [1]}),
        ("POST /_prepare_backend_for_training", {"model": DESCRIBED}), ("POST /_train_model", build_call(MADE_UP)),
    ],
    "tinker": [
        ("create_session", {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"}),
        ("create_model", {**OF_SESSION, "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}), WAIT,
        WAIT, WAIT, ("forward_backward", GRADIENT),
        ("forward_backward", {**GRADIENT, "data": [[[5, 6, 7], PPO]], "loss": "ppo"}),
        ("optim_step", {**NEXT, "adam_params": ADAM}), ("save_weights_external", {**NEXT, "path": "a"}),
        ("save_weights", {**NEXT, "path": "a", "ttl_seconds": 60, "overwrite": True}),
        ("save_weights_for_sampler", {**NEXT, "sampling_session_seq_id": 1, "kind": "inflight"}),
        ("save_weights_for_sampler", {**NEXT, "path": "s", "user_metadata": {"a": "b"}}), WAIT, WAIT,
        ("load_weights", {**NEXT, "path": "<checkpoint>", "optimizer": True}),
        ("load_weights", {**OF_SESSION, "model_seq_id": 1, "path": "<checkpoint>", "optimizer": False}),
        ("create_sampling_session", {**OF_SESSION, "sampling_session_seq_id": 2, "base_model": "tiny"}),
        ("create_sampling_session", {**OF_SESSION, "sampling_session_seq_id": 3, "model_path": "<checkpoint>"}),
        ("asample", {**SAMPLE, "sampling_session_id": "<sample>", "seq_id": 1, "num_samples": 2,
                     "prompt_logprobs": True, "topk_sample_logprobs": 2}),
        ("cancel_future", {"request_id": "<future>"}), ("get_info", {"model_id": "<train>"}),
        ("join_sampling_session", {"sampling_session_id": "<sample>"}),
        ("weights_info", {"tinker_path": "<checkpoint>"}), ("client/config", {}),
        *[(path, OF_SESSION) for path in ("session_heartbeat", "telemetry", "sessions/<tinker>/finish")],
        *[f"GET /api/v1/{path}" for path in ("get_server_capabilities", "samplers/<sample>", "sessions/<tinker>",
          "training_runs/<train>", "training_runs", "training_runs/<train>/checkpoints", "checkpoints", "sessions")],
        "DELETE /api/v1/training_runs/<train>/checkpoints/weights/a",
    ],
}  # fmt: skip
"""What the clients of each protocol send; a path alone is one of Tinker's."""
CLEANUP = (f"POST {JOBS}/<ftjob>/cancel", f"DELETE {ART}/<model>", f"DELETE {ONE}", "sessions/<tinker>/finish",
           "DELETE /v1/files/<file>")  # fmt: skip
ID = re.compile(r'"((?:file|upload|part|ftjob|model|job)-\w{24}|[0-9a-f]{32}|[0-9a-f]{16}[\w:]*|tinker://[\w:/.-]+)"')
KINDS = {"session": r"\w{32}", "tinker": r"\w{16}", "train": r"\w+:train:\d+", "sample": r"\w+:sample:\d+",
         "future": r"\w+:\w+:\d+:\d+", "checkpoint": "tinker:.+"}  # fmt: skip
"""What `<session>` and the like stand for, of the ids in the answers so far; `<file>` and the like: `file-...`."""


class Clients:
    """Clients of one server, which know each other's ids."""

    def __init__(self, url, folder):
        self.folder, self.ids, self.http = folder, [], httpx.Client(base_url=url.removesuffix("/v1"), timeout=5)
        self.honest = self.ask_honestly()

    def ask_honestly(self):
        return self.http.post("/v1/chat/completions", json=HONEST).json()["choices"][0]["message"]["content"]

    def fill(self, value, at):
        """Returns a value with ids in place of their names: the newest of each kind, or one `at` before it."""
        if isinstance(value, dict):
            return {name: self.fill(each, at) for name, each in value.items()}
        if isinstance(value, list):
            return [self.fill(each, at) for each in value]
        if value == "<seq>":
            return sum(each.startswith(self.find("train", at) + ":") for each in self.ids)
        return re.sub(r"<(\w+)>", lambda kind: self.find(kind[1], at), value) if isinstance(value, str) else value

    def find(self, kind, at):
        found = self.list_ids(kind) or ["none"]
        return found[-1 - at % len(found)]

    def list_ids(self, kind):
        return [each for each in self.ids if re.fullmatch(KINDS.get(kind, rf"{kind}-\w+"), each)]

    def send(self, place, body=None, at=0, odd=None):
        """Sends a request, and checks and reads its answer; `odd` stands in its path in place of an id."""
        method, path = place.split() if " " in place else ("POST", f"/api/v1/{place}")
        path = self.fill(path, at) if odd is None else re.sub(r"<\w+>", odd, path)
        sent = {} if body is None else write_body(path, self.fill(body, at))
        with suppress(httpx.ReadTimeout, httpx.RemoteProtocolError):  # the client or ART's stream hangs up
            answer = self.http.request(method, path, **sent)
            self.check(answer.status_code, answer.text, f"{method} {path[:500]} {str(sent)[:3000]}")
            self.ids += [each for each in ID.findall(answer.text) if each not in self.ids]

    def send_bytes(self, method, path, headers, body):
        server = urlsplit(str(self.http.base_url))
        lines = [f"{name}: {text}" for name, text in {"host": server.netloc, **headers}.items()]
        sent = "\r\n".join([f"{method} /{path} HTTP/1.1", *lines, "", ""]).encode("utf-8", "surrogatepass") + body
        with socket.create_connection((server.hostname, server.port), 5) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            if answer := b"".join(iter(lambda: connection.recv(1 << 16), b"")):
                self.check(int(answer.split()[1]), answer.decode("utf-8", "replace"), sent)

    def check(self, status, text, what):
        what = f"{what}: {status} {text[:2000]}"
        assert status < 500 or status in (501, 503, 529), what
        leaks = ("Traceback", "src/reinforge", f"{self.folder}/data", '"category": "server"')
        assert not any(each in text for each in leaks), what

    def check_server(self):
        """Checks that the server is healthy and its model unchanged, and removes what the requests have made."""
        assert self.http.get("/healthz").status_code == 200
        assert self.ask_honestly() == self.honest
        log = (self.folder / "serve.log").read_text()
        assert not re.search("Traceback|never retrieved", log), log[-9000:]
        for place in CLEANUP:
            kind = re.search(r"<(\w+)>", place)[1]
            for at in range(len(self.list_ids(kind))):
                self.send(place, {}, at)
        del self.ids[:-9]  # the next requests may use what is gone


def write_body(path, body):
    if path.endswith(("/files", "/parts")) and isinstance(body, dict):
        parts = {clean(name): each for name, each in body.items() if isinstance(each, list) and len(each) == 2}
        files = {
            name: (clean(file), to_jsonl(rows) if rows == ROWS["file"][1] else to_bytes(rows))
            for name, (file, rows) in parts.items()
        }
        return {"files": files, "data": {clean(name): clean(each) for name, each in body.items()}}
    is_proto, content = path.endswith("forward_backward"), write_json(body)
    if is_proto:
        with suppress(Exception):  # what no message of the SDK can hold is sent as it is
            content = build_body(*(body[name] for name in GRADIENT))
    return {"content": content, "headers": {"content-type": CONTENT_TYPE if is_proto else "application/json"}}


def clean(text):
    return str(text).encode(errors="replace").decode()[:9999]


ODD_IDS = TEXTS | st.sampled_from(["..", "../../../etc/passwd", "a" * 3000, "%2e%2e%2f", "file-" + "0" * 24])
KNOWN_PATHS = st.sampled_from(
    [each.split("/", 1)[1] for family in REQUESTS.values() for each in family if " /" in each]
)
BYTES = st.tuples(st.sampled_from(METHODS), PATHS | KNOWN_PATHS, HEADERS, st.binary(max_size=200))


@st.composite
def streams(draw):
    """Draws requests of one protocol in any order, some of them with parts that are wrong."""
    family = REQUESTS[draw(st.sampled_from(sorted(REQUESTS)))]
    stream = [request if isinstance(request, tuple) else (request,) for request in family[:3]]
    for request in draw(st.lists(st.sampled_from(family), min_size=1, max_size=10)):
        place, body = request if isinstance(request, tuple) else (request, None)
        at, odd = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 5])), None
        if draw(st.booleans()):
            body = None if body is None else draw(damage(body))
            odd = quote(draw(ODD_IDS).encode("utf-8", "surrogatepass"), safe="") if body is None else None
        stream.append((place, body, at, odd))
    return stream


def test_no_requests_harm_other_clients(tmp_path):
    chats = st.lists(requests("tiny").map(lambda chat: (f"POST /v1{chat[0]}", chat[1])), min_size=1, max_size=5)
    options = ("--sessions", "--art", "--tinker", "--allow_python_graders")
    with serve_tiny_model(tmp_path, *options) as url:
        clients = Clients(url, tmp_path)

        @fuzzed(streams() | streams() | chats | st.lists(BYTES, min_size=1, max_size=5), quick=40)
        def check(stream):
            for each in stream:
                (clients.send_bytes if each[0] in METHODS else clients.send)(*each)
            clients.check_server()

        check()
