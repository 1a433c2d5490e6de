"""The property tests of everything that reads others' input, for as long as there is time."""

import random
import tempfile
import time
from pathlib import Path

import pytest

from tests.core.contract import test_yaml_mutations as yaml_documents
from tests.core.dialects import test_tool_calls as tool_calls
from tests.core.evaluation import test_row_limits as rows
from tests.core.evaluation import test_schemas as schemas
from tests.fuzz.fuzzing import SECONDS, fuzzed
from tests.protocols import test_openai_answers as answers
from tests.traces import test_trace_formats as traces

PROPERTIES = [
    answers.test_no_mutated_answer_raises_anything_else,
    rows.test_any_bytes_are_rows_or_a_typed_error,
    schemas.test_any_answer_to_any_schema_has_a_typed_outcome,
    traces.test_a_damaged_export_gives_usable_rows_or_a_typed_error,
    tool_calls.test_any_reply_is_text_or_calls_that_can_be_written_and_read_again,
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_a_property_holds_for_random_input(check, tmp_path, monkeypatch):
    """Each input is made from random bytes, which Hypothesis reads as its choices."""
    monkeypatch.chdir(tmp_path)  # some write their input to a file of a fixed name
    rng, end_s = random.Random(time.time_ns() if SECONDS else 0), time.monotonic() + SECONDS
    for number in range(10**9 if SECONDS else 20):
        if SECONDS and time.monotonic() > end_s:
            break
        content = rng.randbytes(rng.choice((50, 500, 5000)))
        try:
            check.hypothesis.fuzz_one_input(content)
        except BaseException as error:
            raise AssertionError(f"input {number}: {content.hex()}") from error


@fuzzed(yaml_documents.DOCUMENTS)
def test_any_document_is_valid_or_rejected_with_a_location(content):
    with tempfile.TemporaryDirectory() as folder:
        yaml_documents.check_document(Path(folder) / "random.yml", content)
