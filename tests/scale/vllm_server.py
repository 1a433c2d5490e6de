"""A stand-in for a vLLM 0.32 server: its paths, answers and silences, over a tiny model on the CPU.

    with VLLMServer(model_folder, key="k") as server:      in a thread, at server.url
    python -m tests.scale.vllm_server --model FOLDER --uds SOCKET ...     as `vllm serve` is started

The shapes of its answers are those that a real server gave (`tests/data/vllm_answers.json`, written by `make vllm`).
Like the real one it keeps a packed copy of the output layer, which `reload_weights` renews only if the files name that
layer, and keys and values of prompts, by blocks, which are dropped by `/reset_prefix_cache` and after `/pause` alone.

`waits_at` lets replies wait at so many tokens, `num_waiting` says how many do; the next pause that keeps or aborts them
ends it for all.

Attributes that switch a fault on: `keeps_output_layer`, `keeps_prefix_cache`, `ignores_weights`, `loses_label`,
`is_away` (no answer is its own), `is_busy` (it samples nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hmac
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from reinforge.scale.vllm.plugin.reinforge_vllm import WeightReloader, read_tensors
from tests.loop_thread import LoopThread

VERSION = "0.32.0"
BLOCK = 16
FLOOR = -9999.0


class ServedWeights:
    """One set of weights: a module, and a packed copy of its output layer."""

    def __init__(self, module: Any):
        self.module = module.eval()
        self.packed = None
        self.pack()

    def pack(self) -> None:
        self.packed = self.module.get_output_embeddings().weight.detach().clone()

    @property
    def is_tied(self) -> bool:
        return self.module.get_output_embeddings().weight is self.module.get_input_embeddings().weight

    def load(self, folder: Path, *, packs: bool) -> None:
        """Copies the weights of a folder; a tied output layer is packed again only if `packs`."""
        self.copy(dict(load_module(folder).named_parameters()), packs=packs)

    def copy(self, source: dict[str, torch.Tensor], *, packs: bool) -> None:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(source[name])
        if packs or not self.is_tied:
            self.pack()

    def forward(self, token_ids: list[int], past: Any) -> tuple[torch.Tensor, Any]:
        output = self.module.base_model(input_ids=torch.tensor([token_ids]), past_key_values=past, use_cache=True)
        return output.last_hidden_state[0, -1] @ self.packed.T, output.past_key_values


def load_module(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


class VLLMServer:
    """The server.

    Args:
        folder: The model.
        key: Demanded on /v1 and /inference; None: on no path.
        guards: Demand it on every path but /health, as the middleware does.
        extension: The method of our worker extension exists.
        max_model_len: The context.
    """

    def __init__(
        self,
        folder: Path,
        *,
        key: str | None = None,
        guards: bool = True,
        extension: bool = True,
        max_model_len: int = 256,
        version: str = VERSION,
    ):
        self.folder, self.key, self.guards, self.extension = Path(folder), key, guards, extension
        self.max_model_len, self.version = max_model_len, version
        self.served = ServedWeights(load_module(self.folder))
        self.adapters: dict[str, tuple[str, ServedWeights]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.keeps_output_layer = self.keeps_prefix_cache = self.ignores_weights = self.loses_label = False
        self.is_away = self.is_busy = False
        self.waits_at: int | None = None
        self.num_waiting = 0
        self._num_aborts = 0
        self.label, self.url = "default", ""
        self._cache: dict[Any, Any] = {}
        self._paused, self._frozen = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = LoopThread()

    def __enter__(self) -> VLLMServer:
        self._thread.__enter__()
        self._runner = self._thread.call(self._start())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._thread.call(self._runner.cleanup())
        self._thread.__exit__(*exc_info)

    async def _start(self) -> web.AppRunner:
        runner = web.AppRunner(self.build_app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._guard])
        for method, path, handler in (
            ("GET", "/health", self._answer_health),
            ("GET", "/version", self._answer_version),
            ("GET", "/v1/models", self._answer_models),
            ("GET", "/weight_info", self._answer_label),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/reset_prefix_cache", self._reset),
            ("POST", "/update_weight_version", self._set_label),
            ("POST", "/v1/load_lora_adapter", self._load_adapter),
            ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
            ("POST", "/collective_rpc", self._call_workers),
            ("POST", "/inference/v1/generate", self._generate),
        ):
            app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.is_away or (self.is_busy and request.path == "/inference/v1/generate"):
            return web.json_response({"error": "try later"}, status=503)
        needs_key = self.guards or request.path.startswith(("/v1", "/inference"))
        if self.key is not None and needs_key and request.path != "/health":
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given, f"Bearer {self.key}"):
                return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        return await handler(request)

    async def _answer_health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _answer_models(self, request: web.Request) -> web.Response:
        base = self._describe("policy", str(self.folder), None) | {"max_model_len": self.max_model_len}
        others = [self._describe(name, path, "policy") for name, (path, _) in self.adapters.items()]
        return web.json_response({"object": "list", "data": [base, *others]})

    def _describe(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": None,
            "permission": [],
        }

    async def _answer_label(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _pause(self, request: web.Request) -> web.Response:
        self._paused.set()
        if request.query.get("mode") == "abort":
            self._num_aborts += 1
        elif request.query.get("mode") == "keep":
            self._frozen.set()
        if request.query.get("mode") in ("abort", "keep"):
            self.waits_at = None  # what is asked again does not wait
        await asyncio.get_running_loop().run_in_executor(None, lambda: self._lock.acquire() and self._lock.release())
        self._drop_cache()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._paused.clear()
        self._frozen.clear()
        return web.json_response({"status": "resumed"})

    def _drop_cache(self) -> None:
        if not self.keeps_prefix_cache:
            self._cache.clear()

    async def _reset(self, request: web.Request) -> web.Response:
        self._drop_cache()
        return web.json_response({"success": True})

    async def _set_label(self, request: web.Request) -> web.Response:
        if not self.loses_label:
            self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": (await request.json())["new_version"]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if body.get("load_inplace"):
            return _refuse(500, "the real server would read its files again at each step", "InternalServerError")
        if name in self.adapters and not self.ignores_weights:
            return _refuse(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not (Path(path) / "adapter_model.safetensors").is_file():
            return _refuse(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        if not (self.ignores_weights and name in self.adapters):
            self.adapters[name] = (path, ServedWeights(self._merge(Path(path))))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return _refuse(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        if not self.ignores_weights:
            del self.adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _merge(self, folder: Path) -> Any:
        from peft import PeftModel

        module = copy.deepcopy(self.served.module)
        return PeftModel.from_pretrained(module, str(folder), local_files_only=True).merge_and_unload()

    async def _call_workers(self, request: web.Request) -> web.Response:
        body = await request.json()
        method, args = body["method"], body.get("args", [])
        if method != "reload_weights" and not (self.extension and hasattr(WeightReloader, method)):
            return _refuse(500, f"Call to collective_rpc method failed: '{method}'", "InternalServerError")
        try:
            result = await asyncio.to_thread(self._call_worker, method, args)
        except (OSError, RuntimeError) as error:
            return _refuse(500, f"Call to collective_rpc method failed: {error}", "InternalServerError")
        return web.json_response({"results": [result]})

    def _call_worker(self, method: str, args: list[Any]) -> Any:
        if method in ("reinforge_fetch_adapter", "reinforge_drop_adapter"):
            return getattr(WeightReloader(), method)(*args)
        packs = method != "reload_weights"
        tensors = dict(read_tensors(*args)) if method == "reinforge_fetch_weights" else None
        if not self.ignores_weights and tensors is None:
            self.served.load(Path(args[0]), packs=packs and not self.keeps_output_layer)
        elif not self.ignores_weights:
            self.served.copy(tensors, packs=packs and not self.keeps_output_layer)
        return {"num_tied_layers": 2 * self.served.is_tied} if packs else None

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != "policy" and body["model"] not in self.adapters:
            return _refuse(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        settings, prompt = body["sampling_params"], body["token_ids"]
        if len(prompt) + settings["max_tokens"] > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            return _refuse(400, message, "BadRequestError")
        while self._paused.is_set():
            await asyncio.sleep(0.001)
        choice = await asyncio.get_running_loop().run_in_executor(None, self._sample, body["model"], body)
        return web.json_response(
            {
                "request_id": f"generate-tokens-{len(self.calls)}",
                "model": body["model"],
                "created": int(time.time()),
                "usage": {
                    "prompt_tokens": len(prompt),
                    "total_tokens": len(prompt) + len(choice["token_ids"]),
                    "completion_tokens": len(choice["token_ids"]),
                    "prompt_tokens_details": None,
                    "completion_tokens_details": None,
                },
                "prompt_logprobs": None,
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": prompt if body.get("return_token_ids") else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": "tokens",
                "choices": [choice],
            }
        )

    def _wait_while_frozen(self, *, waits: bool = False) -> bool:
        """Lets the weights change while replies are kept; returns whether that was so.

        Args:
            waits: First wait until they are, or aborted.
        """
        was_frozen = waits or self._frozen.is_set()
        self.num_waiting += waits
        while (waits and self.waits_at is not None) or self._frozen.is_set():
            self._lock.release()
            time.sleep(0.001)
            self._lock.acquire()
        self.num_waiting -= waits
        return was_frozen

    @torch.no_grad()
    def _sample(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        settings, prompt = body["sampling_params"], body["token_ids"]
        rng = torch.Generator()
        rng.manual_seed(settings["seed"]) if settings.get("seed") is not None else rng.seed()
        temperature, ends = settings["temperature"], set(settings["stop_token_ids"])
        content, token_ids, reason, spans = [], [], "length", []
        with self._lock:
            self._wait_while_frozen()
            num_aborts = self._num_aborts
            served = self.served if name == "policy" else self.adapters[name][1]
            logits, past = self._prefill(served, name, prompt, reads=not settings.get("skip_reading_prefix_cache"))
            while True:
                logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
                if temperature == 0:
                    token = int(logprobs.argmax())
                else:
                    token = int(torch.multinomial(logprobs.exp(), 1, generator=rng))
                if not spans or spans[-1]["version"] != self.label:
                    spans.append({"version": self.label, "start": len(token_ids)})
                token_ids.append(token)
                spans[-1]["end"] = len(token_ids)
                best = torch.topk(logprobs, settings["logprobs"]).indices.tolist() if settings["logprobs"] else []
                tops = [_candidate(logprobs, each) for each in [token, *(each for each in best if each != token)]]
                content.append({**_candidate(logprobs, token), "top_logprobs": tops})
                if token in ends:
                    reason = "stop"
                if reason == "stop" or len(token_ids) == settings["max_tokens"]:
                    break
                was_frozen = self._wait_while_frozen(waits=len(token_ids) == self.waits_at)
                if num_aborts != self._num_aborts:
                    reason = "abort"
                    break
                if was_frozen:
                    served = self.served if name == "policy" else self.adapters[name][1]
                    logits, past = self._prefill(served, name, prompt + token_ids, reads=False)
                else:
                    logits, past = served.forward([token], past)
        return {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": token_ids[-1] if reason == "stop" else None,
            "token_ids": token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans,
            "logprobs": {"content": content},
        }

    def _prefill(self, served: ServedWeights, name: str, prompt: list[int], *, reads: bool) -> tuple[torch.Tensor, Any]:
        """Computes a prompt; whole blocks of it come from the cache, and go there."""
        size = (len(prompt) - 1) // BLOCK * BLOCK
        key, past = (name, *prompt[:size]), None
        if size:
            if not reads or key not in self._cache:
                _, past = served.forward(prompt[:size], None)
                if reads:
                    self._cache[key] = copy.deepcopy(past)
            else:
                past = copy.deepcopy(self._cache[key])
        return served.forward(prompt[size:], past)


def _candidate(logprobs: torch.Tensor, token: int) -> dict[str, Any]:
    rank = int((logprobs > logprobs[token]).sum()) + 1
    return {"token_id": token, "logprob": max(float(logprobs[token]), FLOOR), "rank": rank}


def _refuse(status: int, message: str, kind: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def main() -> None:
    """Serves as `vllm serve` would, with the arguments that it is given."""
    parser = argparse.ArgumentParser()
    for name in ("model", "uds", "max-model-len"):
        parser.add_argument(f"--{name}", required=True)
    arguments, rest = parser.parse_known_args()
    sys.stdout.write(f"{rest}\n")
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")  # vLLM's engine is a process of its own, too
    torch.set_num_threads(1)
    server = VLLMServer(Path(arguments.model), max_model_len=int(arguments.max_model_len))
    web.run_app(server.build_app(), path=arguments.uds, print=None)


if __name__ == "__main__":
    main()
