"""Additions to a vLLM server (as of vLLM 0.32): exact weights after a reload, and a key for every path.

With this folder on its PYTHONPATH, a server takes them by

    --worker-extension-cls reinforge_vllm.WeightReloader --middleware reinforge_vllm.KeyGuard
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class WeightReloader:
    """Extends vLLM's worker with a reload that also replaces packed copies of tied weights."""

    def reinforge_reload_weights(self, folder: str) -> dict[str, int]:
        """Loads the weights of a model folder.

        On a CPU each layer keeps a packed copy of its weights. `reload_weights` makes a new copy for each layer that
        the files name, but an output layer that is tied to the embeddings is in no file: it would keep the old copy.
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        layers = list(worker.model_runner.get_model().modules())
        counts = Counter(id(weight) for layer in layers if (weight := _get_weight(layer)) is not None)
        tied = [layer for layer in layers if counts[id(_get_weight(layer))] > 1 and hasattr(layer, "quant_method")]
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
        return {"num_tied_layers": len(tied)}


def _get_weight(layer: Any) -> Any:
    return layer._parameters.get("weight")


class KeyGuard:
    """ASGI middleware that requires `VLLM_API_KEY` on every path but `/health`; vLLM itself guards only some."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        key = os.environ.get("VLLM_API_KEY", "")
        if not key:
            raise RuntimeError("set VLLM_API_KEY: anyone who reaches this server can change its weights")
        self.app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        return await send({"type": "http.response.body", "body": b'{"error": "the key is missing or wrong"}'})
