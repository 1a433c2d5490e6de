"""Additions to a vLLM server (as of vLLM 0.32): exact weights after a reload, weights from another machine, and a key
for every path.

With this folder on its PYTHONPATH, a server takes them by

    --worker-extension-cls reinforge_vllm.WeightReloader --middleware reinforge_vllm.KeyGuard
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


CHUNK = 1 << 22
TIMEOUT_S = 600
ADAPTER_PREFIX = "reinforge-adapter-"
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of safetensors, by its name there."""


@contextmanager
def open_checked(url: str, digest: str) -> Iterator[Callable[[int], bytes]]:
    """Opens a file of the run, which must be read whole: at the end what was read must have this digest."""
    found = hashlib.sha256()
    with build_opener(ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:

        def read(size: int) -> bytes:
            data: bytes = answer.read(size)
            found.update(data)
            return data

        yield read
    if not hmac.compare_digest(found.hexdigest(), digest):
        raise RuntimeError(f"{url} arrived damaged: its SHA-256 is not {digest}")


def read_tensors(url: str, digests: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Reads the tensors of safetensors files, in their order there."""
    import torch

    for name, digest in digests.items():
        if not name.endswith(".safetensors"):
            continue
        with open_checked(f"{url}/{name}", digest) as read:
            header = json.loads(read(int.from_bytes(read(8), "little")))
            header.pop("__metadata__", None)
            for tensor, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                start, end = entry["data_offsets"]
                data = bytearray(read(end - start))
                if len(data) < end - start:
                    raise RuntimeError(f"{url}/{name} ended early")
                yield (
                    tensor,
                    torch.frombuffer(data, dtype=getattr(torch, TYPES[entry["dtype"]])).reshape(entry["shape"]),
                )


class WeightReloader:
    """Extends vLLM's worker with a reload that also replaces packed copies of tied weights."""

    def reinforge_reload_weights(self, folder: str) -> dict[str, int]:
        """Loads the weights of a model folder."""
        return self._reload(weights_path=folder)

    def reinforge_fetch_weights(self, url: str, digests: Mapping[str, str]) -> dict[str, int]:
        """Loads weights that the run offers over HTTP, one tensor after the other: no file is written here."""
        return self._reload(weights_iterator=read_tensors(url, digests))

    def reinforge_fetch_adapter(self, url: str, digests: Mapping[str, str]) -> str | None:
        """Copies an adapter's files into a temporary folder, which all workers of this machine see; returns it."""
        worker: Any = self
        if getattr(worker, "local_rank", 0):
            return None
        folder = tempfile.mkdtemp(prefix=ADAPTER_PREFIX)
        try:
            for name, digest in digests.items():
                with open_checked(f"{url}/{name}", digest) as read, open(Path(folder, Path(name).name), "wb") as file:
                    while chunk := read(CHUNK):
                        file.write(chunk)
        except BaseException:
            self.reinforge_drop_adapter(folder)
            raise
        return folder

    def reinforge_drop_adapter(self, folder: str) -> None:
        """Removes the folder again; the adapter is in memory."""
        if Path(folder).name.startswith(ADAPTER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)

    def _reload(self, **source: Any) -> dict[str, int]:
        """Reloads all weights.

        On a CPU each layer keeps a packed copy of its weights. `reload_weights` makes a new copy for each layer that
        the files name, but an output layer that is tied to the embeddings is in no file: it would keep the old copy.
        """
        worker: Any = self
        worker.reload_weights(**source)
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
