"""The file of records: one JSON object a line, begun anew at a size."""

import json

import pytest

from nearkv.ingress.recording.filing import RecordFile
from nearkv.ingress.recording.records import line_of
from tests.ingress.recording.request_records import served


def record_file(path, **limits):
    return RecordFile(
        path,
        read=lambda record: line_of(record, "s1"),
        **{"limit_bytes": 1 << 20, "kept": 2} | limits,
    )


def ids(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_records_are_appended_also_by_the_next_process(tmp_path):
    path = tmp_path / "d.jsonl"
    record_file(path).write([served(id="1"), served(id="2")])
    record_file(path).write([served(id="3")])
    assert ids(path) == ["1", "2", "3"]


def test_a_full_file_is_moved_aside_and_few_are_kept(tmp_path):
    path = tmp_path / "d.jsonl"
    file = record_file(path, limit_bytes=10, kept=3)
    for number in range(6):
        file.write([served(id=str(number))])
    assert {p.name: ids(p) for p in tmp_path.iterdir()} == {
        "d.jsonl": ["5"],
        "d.jsonl.1": ["4"],
        "d.jsonl.2": ["3"],
        "d.jsonl.3": ["2"],
    }


def test_a_file_that_was_taken_away_is_begun_anew(tmp_path):
    path = tmp_path / "d.jsonl"
    file = record_file(path)
    file.write([served(id="1")])
    path.rename(tmp_path / "taken")
    file.write([served(id="2")])
    assert ids(path) == ["2"]


def test_a_file_that_cannot_be_written_says_so_at_once(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        record_file(tmp_path / "no" / "d.jsonl").check()
