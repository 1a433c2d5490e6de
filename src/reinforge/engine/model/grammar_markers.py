"""Binds the markers of a grammar to the tokenizer's own tokens.

A grammar that forces a tool call is written from the chat template alone. Its rules `marker_N` and `until_N` name texts
such as `<tool_call>`, which most tokenizers of the family have as one token, and a grammar must then name that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_MARKER = re.compile(r'^(marker_\d+): ("(?:[^"\\]|\\.)*")$', re.MULTILINE)
_UNTIL = re.compile(r'^(until_\d+)\[suffix=("(?:[^"\\]|\\.)*")\]: .*$', re.MULTILINE)


def bind_markers(text: str, token_ids: Mapping[str, int]) -> str:
    r"""Returns a grammar whose markers are tokens where the tokenizer has them.

    Example: `bind_markers('start: marker_0\nmarker_0: "<call>"\n', {"<call>": 7})` ->
    `'start: marker_0\nmarker_0: <[7]>\n'`.

    Args:
        token_ids: The tokenizer's added tokens, which are never part of other text.
    """

    def bind(found: re.Match[str], before: str) -> str:
        token = token_ids.get(json.loads(found[2]))
        return found[0] if token is None else f"{found[1]}: {before}<[{token}]>"

    text = _MARKER.sub(lambda found: bind(found, ""), text)
    return _UNTIL.sub(lambda found: bind(found, "/(?s:.*)/ "), text)
