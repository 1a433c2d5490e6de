"""Masks e-mail addresses and keys: `write to ann@example.com, key sk-abc...` -> `write to [email], key sk-***`.

Names, addresses and telephone numbers need a tool made for that; this one masks what has an unmistakable form.
"""

from __future__ import annotations

import re
from typing import Any

from reinforge.safe_text import redact_known_forms

EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}")


def redact_value(value: Any) -> Any:
    """Returns plain data in which every text is masked; names of fields stay."""
    if isinstance(value, str):
        return EMAIL.sub("[email]", redact_known_forms(value))
    if isinstance(value, dict):
        return {key: redact_value(each) for key, each in value.items()}
    return [redact_value(each) for each in value] if isinstance(value, list) else value
