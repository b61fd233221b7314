"""Questions about records: read, refused, answered."""

import pytest

from nearkv.ingress.recording.querying import (
    ExplainQuestion,
    QuestionError,
    RecordQuestion,
    Selection,
    read_explain_question,
    read_record_question,
)
from tests.ingress.recording.request_records import served


def select(records, question):
    selection = Selection(question)
    selection.add(records)
    return selection.found, selection.count


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"limit": "0"}, "limit: expected 1 to 1000, got '0'"),
        ({"limit": "1001"}, "limit: expected"),
        ({"limit": "x"}, "limit: expected"),
        ({"limit": "9" * 5000}, "limit: expected"),
        ({"min_error_ratio": "-1"}, "min_error_ratio: expected"),
        ({"min_error_ratio": "nan"}, "min_error_ratio: expected"),
        ({"engines": "a"}, "engines: no such parameter; known: engine, limit"),
    ],
)
def test_a_bad_question_names_its_field(query, said):
    with pytest.raises(QuestionError, match=said):
        read_record_question(query)


def test_questions_are_read():
    query = {"limit": "7", "model": "m", "engine": "e", "reason": "r", "min_error_ratio": "0.5"}
    assert read_record_question(query) == RecordQuestion(7, "m", "e", "r", 0.5)
    assert read_explain_question({"request": "x"}) == ExplainQuestion("x")
    with pytest.raises(QuestionError, match="request: give"):
        read_explain_question({})


@pytest.mark.parametrize(
    ("question", "taken"),
    [
        (RecordQuestion(), True),
        (RecordQuestion(model="tiny", engine="a", reason="prefix_hit"), True),
        (RecordQuestion(model="other"), False),
        (RecordQuestion(engine="b"), False),
        (RecordQuestion(reason="hint"), False),
        (RecordQuestion(min_error_ratio=0.1), True),
        (RecordQuestion(min_error_ratio=0.3), False),
    ],
)
def test_fields_restrict(question, taken):
    assert question.takes(served()) is taken


def test_a_prefill_engine_is_found_too():
    record = served()
    record.prefill_engine = "p"
    assert RecordQuestion(engine="p").takes(record)


def test_what_was_not_measured_is_no_error():
    record = served()
    record.began_at = None
    assert not RecordQuestion(min_error_ratio=0.0).takes(record)


def test_the_limit_leaves_the_count():
    records = [served(id=str(number)) for number in range(5)]
    found, count = select(records, RecordQuestion(limit=2))
    assert ([r.request_id for r in found], count) == (["0", "1"], 5)
