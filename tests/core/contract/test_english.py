"""What people read is American English, in the field's words: a short list of what is not stays out of it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS = {
    r"\b(expected|must be|whether|be|is) a text\b": "a string",
    r"\b(lists?|pairs?|sequence) of texts\b|\bexpected texts?\b": "strings, a string",
    r"\b(is|are) no (valid|regular|complete|name of|hub id|adapter|folder|message|scores?|numbers?)\b": "is not",
    r"\b(is|are) no (JSON|HTTP|Python)\b": "is not",
    r"\bgo(es)? on (with|sampling|counting|running)\b": "continues, keeps running",
    r"\b(some|every|no)body (else )?(may|can|has|serves|reaches|waits|streams)\b": "another user, anyone",
    r"\bwhoever\b|\bstrangers?\b|\bother people's\b": "anyone who, other users",
    r"\bdoors?\b(?! (handle|bell|mat|lock|camera))": "endpoint, access",
    r"\bmended\b|\bmends\b": "fixed",
    r"\b(process|worker|server|program|driver)(es|s)? (has |have )ended\b": "exited, died, was killed",
    r"\b(was|is) ended by\b": "stopped",
    r"\bhangs up\b|\bhung up\b": "disconnects",
    r"\bgives? no sign\b|\bsigns? of life\b": "does not respond, heartbeat",
    r"\bbelongs? into\b": "belongs in",
    r"\banew\b": "again, restarted",
    r"\bin the place of\b": "in place of",
    r"\bfor want of\b": "for lack of",
    r"\bcommonest\b": "most common",
    r"\bearlier version of ours\b|\bnot supported in this version\b": "what holds now",
    r"\b(honour|behaviour|favour|neighbour|colour|licence|labell|optimis(?!tic)|normalis|organis|recognis)": "American",
    r"\b(penalis|serialis|initialis|tokenis|centred|learnt|spelt|towards|whilst|amongst|artefact|analyse)": "American",
}
ANY = re.compile("|".join(f"(?:{pattern})" for pattern in WORDS))
THERE = re.compile(r"[Tt]here (is|are) $")
"""`There is no folder` is English; `it is no folder` is not."""
DATA = ("tasks/tickets/grammar.py",)
"""Files whose words are the data of a task."""


def list_files():
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from (path for path in sorted((ROOT / "src" / "reinforge").rglob("*.py")) if not str(path).endswith(DATA))


def find_words(text):
    for pattern, better in WORDS.items() if ANY.search(text) else ():
        for match in re.finditer(pattern, text):
            begin = text.rfind("\n", 0, match.start()) + 1
            if not THERE.search(text[begin : match.end(1)] + " " if match.lastindex else ""):
                yield text.count("\n", 0, begin) + 1, f"{match[0]!r}: say {better}"


def test_the_words_of_the_list_stay_out():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in list_files()
        for line, what in find_words(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "expected a text, found 3",
        "x is no regular file",
        "the run goes on with it",
        "whoever calls it",
        "labelled rows",
        "expected text, found 3",
        "the worker has ended",
        "the client hangs up",
        "it belongs into the file",
    ],
)
def test_such_a_line_is_found(line):
    assert list(find_words(line))


def test_there_is_no_folder_is_english():
    assert list(find_words("there is no folder x")) == []
