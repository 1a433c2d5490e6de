"""OpenAI's text completions (`/v1/completions`): a prompt as text or as token ids, without a chat template.

    {"model": "m", "prompt": "2 + 2 ="}   ->  create(prompt="2 + 2 =", max_tokens=16)
    {"model": "m", "prompt": [17, 10]}    ->  create(prompt=[17, 10], max_tokens=16)

A call has one prompt, since one call is one turn of the episode; `reinforge serve` splits a list of several before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.chat_call import DONE, ChatCall, ReplyHead, encode_event, find_rest, split_text
from reinforge.dialects.fields import Fields, describe, keep_given, read_stop
from reinforge.dialects.reply_tokens import ReplyTokens, read_tokens
from reinforge.types.request import ReplyDelta

DEFAULT_MAX_TOKENS = 16  # of OpenAI's API, for a request that does not say
MAX_TOKEN_ID = 2**31
_EXTRA = ("top_k", "min_p")
_READ = {"model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options",
         "logprobs", "frequency_penalty", "presence_penalty", "logit_bias", "return_token_ids", "best_of",
         *_EXTRA}  # fmt: skip
_REFUSED = {
    "echo": "the prompt is not part of the reply that is trained; put it in front of the text yourself",
    "suffix": "the model only continues text; leave it out",
}


def read_request(body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
    del omits_content  # a prompt is text
    fields = Fields(body)
    fields.refuse(_REFUSED)
    fields.note_unread(_READ)
    n = fields.integer("n", least=1)
    if fields.integer("best_of", least=1) not in (None, n or 1):
        raise fields.bad("best_of", "the best reply cannot be chosen here; leave it out, ask for n replies and choose")
    options = fields.nested("stream_options")
    logprobs = _read_num_logprobs(fields)
    arguments = keep_given(
        prompt=_read_prompt(fields),
        max_tokens=DEFAULT_MAX_TOKENS if body.get("max_tokens") is None else fields.integer("max_tokens", least=1),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        n=n,
        stop=read_stop(fields, "stop"),
        seed=fields.integer("seed"),
        frequency_penalty=fields.number("frequency_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        logit_bias=None if (bias := fields.nested("logit_bias")) is None else dict(bias.value),
        logprobs=logprobs is not None or None,
        top_logprobs=logprobs or None,
        extra_body={name: value for name in _EXTRA if (value := fields.number(name)) is not None} or None,
    )
    given = {
        "include_usage": bool(options and options.flag("include_usage")),
        "logprobs": logprobs is not None,
        "return_token_ids": bool(fields.flag("return_token_ids")),
    }
    model = fields.require("model", fields.text("model"))
    return ChatCall(arguments, model, bool(fields.flag("stream")), given, tuple(fields.notes.ignored))


def _read_num_logprobs(fields: Fields) -> int | None:
    found = fields.value.get("logprobs")
    if isinstance(found, bool):
        return 0 if found else None
    return fields.integer("logprobs", least=0)


def _read_prompt(fields: Fields) -> str | list[int]:
    prompt = fields.require("prompt", fields.value.get("prompt"))
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        if len(prompt) > 1:
            raise fields.bad("prompt", f"{len(prompt)} prompts in one call; send each in a separate call")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    is_ids = isinstance(prompt, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < MAX_TOKEN_ID for each in prompt
    )
    if not is_ids or not prompt:
        raise fields.bad("prompt", f"expected a string or a list of token ids, found {describe(prompt)}")
    return list(prompt)


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    choices = [_write_choice(choice, call) for choice in completion["choices"]]
    return {**_write_head(completion), "choices": choices, "usage": dict(completion["usage"])}


class CompletionEvents:
    """Writes the events of a completion while its replies are sampled; log-probs and ids come with the last one."""

    def __init__(self, call: ChatCall, head: ReplyHead | None = None):
        self._call, self._sent = call, dict[int, str]()
        self._head = {} if head is None else _write_head(head.build_completion())

    def write(self, delta: ReplyDelta) -> bytes:
        if not delta.content:
            return b""
        self._sent[delta.index] = self._sent.get(delta.index, "") + delta.content
        return _encode_piece(self._head, delta.index, delta.content)

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        head = _write_head(completion)
        for choice in completion["choices"]:
            whole = _write_choice(choice, self._call)
            text, reason = whole.pop("text"), whole.pop("finish_reason")
            for piece in split_text(find_rest(text, self._sent.get(whole["index"], ""))):
                yield _encode_piece(head, whole["index"], piece)
            yield encode_event({**head, "choices": [{**whole, "text": "", "finish_reason": reason}]})
        if self._call.options.get("include_usage"):
            yield encode_event({**head, "choices": [], "usage": dict(completion["usage"])})
        yield DONE


def _encode_piece(head: Mapping[str, Any], index: int, text: str) -> bytes:
    part = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    return encode_event({**head, "choices": [part]})


def _write_head(completion: Mapping[str, Any]) -> dict[str, Any]:
    head = {"id": completion["id"], "object": "text_completion", "created": completion["created"]}
    return {**head, **{name: completion[name] for name in ("model", "model_version") if name in completion}}


def _write_choice(choice: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    reason = "length" if choice["finish_reason"] == "length" else "stop"
    tokens = read_tokens(choice)
    written = {
        "index": choice["index"],
        "text": choice["message"].get("content") or "",
        "logprobs": _write_logprobs(tokens) if call.options.get("logprobs") and tokens is not None else None,
        "finish_reason": reason,
    }
    if call.options.get("return_token_ids") and tokens is not None:
        written["prompt_token_ids"] = list(tokens.prompt_token_ids)
        written["token_ids"] = list(tokens.token_ids)
    return written


def _write_logprobs(tokens: ReplyTokens) -> dict[str, Any]:
    """Returns the four lists of the older format.

    Example: tokens "a", "bc" -> {"tokens": ["a", "bc"], ..., "text_offset": [0, 1]}
    """
    offsets, position = [], 0
    for text in tokens.texts:
        offsets.append(position)
        position += len(text)
    tops = [{each["token"]: each["logprob"] for each in top} for top in tokens.top_logprobs]
    return {
        "tokens": list(tokens.texts),
        "token_logprobs": list(tokens.logprobs),
        "top_logprobs": tops or [{} for _ in tokens.texts],
        "text_offset": offsets,
    }


open_events = CompletionEvents
