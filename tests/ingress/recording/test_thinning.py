"""Of very many records some are kept, and all that tell of trouble."""

from nearkv.ingress.recording.records import Failure
from nearkv.ingress.recording.thinning import Thinning
from tests.ingress.recording.request_records import served


def ended(second, *, name="r", outcome="ok", failures=()):
    record = served(id=name)
    record.ended_at, record.outcome, record.failures = second, outcome, list(failures)
    return record


def kept_of(records, per_second):
    kept = []
    thinning = Thinning(kept.append, per_second=per_second)
    for record in records:
        thinning.add(record)
    return [record.request_id for record in kept], thinning.skipped


def test_each_second_has_its_share():
    records = [ended(1.0 + i / 10, name=f"a{i}") for i in range(5)]
    records += [ended(2.0 + i / 10, name=f"b{i}") for i in range(3)]
    assert kept_of(records, per_second=2) == (["a0", "a1", "b0", "b1"], 4)


def test_trouble_is_always_kept_and_takes_no_share():
    failure = Failure("e", "answer", "died", 1.0)
    records = [
        ended(1.0, name="refused", outcome="refused"),
        ended(1.1, name="retried", failures=[failure]),
        ended(1.2, name="usual"),
        ended(1.3, name="another"),
        ended(1.4, name="broken", outcome="broken"),
    ]
    kept, skipped = kept_of(records, per_second=1)
    assert kept == ["refused", "retried", "usual", "broken"]
    assert skipped == 1


def test_zero_keeps_all():
    assert kept_of([ended(1.0, name=f"r{i}") for i in range(9)], per_second=0)[1] == 0
