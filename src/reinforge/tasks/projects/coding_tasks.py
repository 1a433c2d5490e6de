"""Eight small repositories with a bug each, for a coding agent to fix, and the tests that it does not see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TASKS = {
    "average": (
        "average.py: `average` fails for an empty list. It must return 0.0 then.",
        "def average(numbers):\n    return sum(numbers) / len(numbers)\n",
        ("average([]) == 0.0", "average([1, 2]) == 1.5"),
    ),
    "clamp": (
        "clamp.py: `clamp` must keep a value between low and high, but it returns low for a value that is too high.",
        "def clamp(value, low, high):\n    return min(low, max(value, high))\n",
        ("clamp(5, 0, 3) == 3", "clamp(-1, 0, 3) == 0", "clamp(2, 0, 3) == 2"),
    ),
    "dedupe": (
        "dedupe.py: `dedupe` must keep the order in which the items occur first, but it loses it.",
        "def dedupe(items):\n    return sorted(set(items))\n",
        ("dedupe([3, 1, 3, 2]) == [3, 1, 2]", "dedupe([]) == []"),
    ),
    "leap": (
        "leap.py: `is_leap` is wrong for the years 1900 and 2000.",
        "def is_leap(year):\n    return year % 4 == 0\n",
        ("not is_leap(1900)", "is_leap(2000)", "is_leap(2024)", "not is_leap(2023)"),
    ),
    "palindrome": (
        "palindrome.py: `is_palindrome` must ignore spaces and the case of letters.",
        "def is_palindrome(text):\n    return text == text[::-1]\n",
        ('is_palindrome("Never odd or even")', 'is_palindrome("level")', 'not is_palindrome("lever")'),
    ),
    "pages": (
        "pages.py: `count_pages` must count the last page, too, if it is not full.",
        "def count_pages(num_items, page_size):\n    return num_items // page_size\n",
        ("count_pages(21, 10) == 3", "count_pages(20, 10) == 2", "count_pages(0, 10) == 0"),
    ),
    "slug": (
        "slug.py: `slug` must join words with one hyphen each, however many spaces are between them.",
        'def slug(title):\n    return title.lower().replace(" ", "-")\n',
        ('slug("Two  Words ") == "two-words"', 'slug("One") == "one"'),
    ),
    "window": (
        "window.py: `windows` must also return the last window.",
        "def windows(items, size):\n    return [items[i : i + size] for i in range(len(items) - size)]\n",
        ("windows([1, 2, 3], 2) == [[1, 2], [2, 3]]", "windows([1], 1) == [[1]]"),
    ),
}
"""What to do, the file with the bug, and what its tests assert, by the name of the folder and its file."""


def write_tasks() -> Iterable[Mapping[str, Any]]:
    for number, (name, (task, _, _)) in enumerate(TASKS.items()):
        split = "train" if number < 6 else ("select", "confirm")[number - 6]
        yield {"id": name, "question": f"Fix a bug in {task} Do not ask questions.", "folder": name, "split": split}


def write_repositories() -> dict[str, str]:
    """Returns the files of every repository, and of their tests, by path."""
    files = {}
    for name, (_, code, assertions) in TASKS.items():
        function = code.split("(")[0].removeprefix("def ")
        tests = "".join(f"\n\ndef test_{number}():\n    assert {text}\n" for number, text in enumerate(assertions))
        files[f"tasks/{name}/{name}.py"] = code
        files[f"tests/{name}/test_{name}.py"] = f"from {name} import {function}\n{tests}"
    return files
