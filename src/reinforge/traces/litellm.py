"""LiteLLM: the standard logging payload (files, buckets, callbacks) and the rows of the proxy's table of spend logs.

Spend logs hold messages only if the proxy runs with `store_prompts_in_spend_logs: true`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reinforge.traces import entries
from reinforge.traces.messages import (
    SYSTEM_FIELDS,
    add_system,
    get_mapping,
    parse_json,
    read_messages,
    read_reply,
    read_tools,
)

CHAT_CALLS = ("completion", "text_completion", "anthropic_messages", "responses", "generate_content")


class LiteLLM(entries.ExportFormat):
    name = "litellm"

    def matches(self, record: entries.Record) -> bool:
        if isinstance(record.get("standard_logging_object"), Mapping):
            return True
        return "call_type" in record and any(
            key in record for key in ("messages", "request_id", "proxy_server_request")
        )

    def split(self, record: entries.Record) -> Iterator[entries.Record]:
        payload = record.get("standard_logging_object")
        yield payload if isinstance(payload, Mapping) else record

    def read(self, part: entries.Record) -> Iterator[entries.Entry]:
        kind = entries.get_text(part, "call_type") or "completion"
        if not kind.endswith(CHAT_CALLS):
            raise entries.IgnoredRecordError(f"LiteLLM calls of the type {kind}")
        if entries.get_text(part, "status") not in ("", "success"):
            raise entries.IgnoredRecordError("LiteLLM calls that failed")
        request = get_mapping(part, "proxy_server_request")
        request = get_mapping(request, "body") or request
        given = parse_json(part.get("messages")) or request.get("messages") or request.get("input")
        response = parse_json(part.get("response"))
        if not given or not response:
            what = "set store_prompts_in_spend_logs: true in the proxy's general_settings, and log again"
            raise entries.UnreadableRecordError(f"the log has no messages or no response; {what}")
        system = next((request[key] for key in SYSTEM_FIELDS if request.get(key)), None)
        messages = add_system(read_messages(given), system)
        options, metadata = get_mapping(part, "model_parameters"), get_mapping(part, "metadata")
        yield entries.Exchange.of_call(
            messages,
            read_reply(response),
            id=entries.get_text(part, "request_id", "id", "litellm_call_id"),
            trace=entries.get_text(part, "trace_id"),
            conversation=_find_session(part, metadata),
            start=entries.get_text(part, "startTime", "start_time"),
            tools=read_tools(
                options.get("tools") or get_mapping(options, "optional_params").get("tools") or request.get("tools")
            ),
        )


def _find_session(part: entries.Record, metadata: entries.Record) -> str:
    inner = [get_mapping(metadata, key) for key in ("requester_metadata", "spend_logs_metadata")]
    keys = ("session_id", "conversation_id", "thread_id", "litellm_session_id")
    return next((found for source in (part, metadata, *inner) if (found := entries.get_text(source, *keys))), "")
