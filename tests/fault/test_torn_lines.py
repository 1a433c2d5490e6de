"""A partial line that a crash left in `training_metrics.jsonl` prevents neither reading nor appending."""

import pytest

from reinforge import files
from reinforge.files import append_line, read_lines

ROWS = [{"epoch": epoch, "avg_reward": epoch / 7, "note": "naïve — 勝\n\r"} for epoch in range(6)]
NEW = [{"epoch": 100}, {"epoch": 101, "note": "after the crash"}]


def test_a_file_cut_at_any_byte_keeps_its_complete_rows_and_takes_new_ones(tmp_path):
    path = tmp_path / "training_metrics.jsonl"
    for row in ROWS:
        append_line(path, row)
    whole = path.read_bytes()
    assert read_lines(path) == ROWS
    ends = [at for at, byte in enumerate(whole, 1) if byte == ord("\n")]
    for cut in range(ends[-4], len(whole) + 1):  # every byte of the last three rows
        path.write_bytes(whole[:cut])
        kept = ROWS[: sum(end <= cut for end in ends)]
        assert read_lines(path) == kept
        for row in NEW:
            append_line(path, row)
        assert read_lines(path) == [*kept, *NEW], f"cut at byte {cut}"


def test_a_file_without_a_complete_row_takes_new_ones(tmp_path):
    path = tmp_path / "training_metrics.jsonl"
    path.write_bytes(b'{"epoch": 0, "a_long_row": "' + b"x" * 10_000)
    append_line(path, NEW[0])
    assert read_lines(path) == NEW[:1]


def test_a_partial_line_that_is_not_removed_damages_the_next_row(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(files, "_find_complete_length", lambda file, size: size)
    with pytest.raises(ValueError, match="Expecting|Invalid|Unterminated"):
        test_a_file_without_a_complete_row_takes_new_ones(tmp_path)
