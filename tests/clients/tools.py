"""The tool of every agent here."""

RESULT = "24 coins"
"""Part of what it returns; the models of the tests are never able to write it."""
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Returns the price of an article.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def lookup(item: str) -> str:
    """Returns the price of an article."""
    return f"The {item} costs {RESULT}."
