"""Which reports are taken."""

from dataclasses import replace

import msgspec
import pytest

from nearkv.extender.view.summaries import (
    Refusal,
    SummaryRefusedError,
    SummaryStore,
    decode_summary,
    pods_newly_covered,
    usable_paths,
)
from tests.extender.view.things import device, group, path, report, summary


def refusal(action, *args, **kwargs):
    with pytest.raises(SummaryRefusedError) as caught:
        action(*args, **kwargs)
    return caught.value.reason


def body(**fields):
    return msgspec.json.encode(summary(**fields))


HEAD = b'{"node": "n1", "boot": "b", "seq": 1, "interval_seconds": 5, '


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"null",
        b"[]",
        b"<html>",
        b'{"node": "n1"}',
        b'{"node": "n1", "boot": "b", "seq": -1.5, "interval_seconds": 5}',
        b'{"node": "n1", "boot": "b", "seq": 1, "interval_seconds": NaN}',
        b"[" * 100_000,
        b'{"colour": ' + b"[" * 100_000,
        b"\xff\xfe",
        body(node="", boot="b"),
        body(boot=""),
        body(interval_seconds=0.0),
        body(interval_seconds=1e9),
        body(groups=(group(held=-1),)),
        body(groups=(group("g" * 300),)),
        body(devices=(device(used_ratio=-1.0),)),
        HEAD + b'"groups": [{"group": "g", "held_bytes": 1' + b"0" * 400 + b"}]}",
        HEAD + b'"devices": [{"id": "d", "total_bytes": 1, "used_bytes": 1' + b"0" * 400 + b"}]}",
        body(paths=(path(""),)),
    ],
)
def test_garbage_is_refused(given):
    assert refusal(decode_summary, given, node="") is Refusal.GARBAGE


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": (device(),) * 65},
        {"groups": (group(),) * 65},
        {"paths": (path("s"),) * 129},
        {"pods": ("u",) * 1025},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_too_much_of_anything_is_refused(fields):
    assert refusal(decode_summary, body(**fields), node="n1") is Refusal.TOO_MUCH


def test_an_agent_cannot_speak_for_another_node():
    assert refusal(decode_summary, body(node="n2"), node="n1") is Refusal.WRONG_NODE
    assert decode_summary(body(node="n2"), node="").node == "n2"


def test_a_newer_schema_is_refused_and_unknown_fields_are_not():
    assert refusal(decode_summary, body(schema_version=2), node="n1") is Refusal.WRONG_VERSION
    known = msgspec.json.decode(body())
    assert decode_summary(msgspec.json.encode(known | {"colour": "red"}), node="n1").seq == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"bytes_per_second": 0.0},
        {"bytes_per_second": 1e300},
        {"setup_seconds": -1.0},
        {"setup_seconds": 1e9},
        {"count": 0},
        {"count": 10**400},
        {"age_seconds": -5.0},
    ],
)
def test_paths_that_cannot_be_are_passed_over(fields):
    said = summary(paths=(path("s", **fields), path("t")))
    assert [each.source for each in usable_paths(said)] == ["t"]


# -- Order -----------------------------------------------------------------------------------


@pytest.fixture
def store():
    return SummaryStore(hold_seconds=30.0)


def test_a_sequence_that_falls_is_refused_and_changes_nothing(store):
    store.take(report(seq=5))
    assert refusal(store.take, report(seq=4, at=1.0)) is Refusal.OLDER
    assert store.get("n1").summary.seq == 5
    assert store.get("n1").received_at == 0.0


def test_a_new_boot_starts_over(store):
    store.take(report(seq=5))
    change = store.take(report(boot="c", seq=1, at=1.0))
    assert change.before.summary.seq == 5
    assert store.get("n1").summary.boot == "c"


def test_the_same_again_is_no_news_but_is_fresh(store):
    store.take(report(seq=5))
    change = store.take(report(seq=5, at=9.0))
    assert not change.is_news
    assert store.get("n1").received_at == 9.0


def test_a_report_that_holds_is_fresh_if_it_is_of_this_agent(store):
    assert not store.heard("n1", "http://agent", 1.0, 30.0)
    store.take(report())
    assert not store.heard("n1", "http://other", 1.0, 30.0)
    assert store.heard("n1", "http://agent", 2.0, 50.0)
    assert (store.get("n1").received_at, store.get("n1").promised_seconds) == (2.0, 50.0)


def test_a_lost_agents_report_ages_by_its_own_interval(store):
    store.take(report())
    assert not store.lost("n1", "http://other")
    assert store.lost("n1", "http://agent")
    assert (store.get("n1").received_at, store.get("n1").promised_seconds) == (0.0, 5.0)
    assert not store.lost("n1", "http://agent")


def test_two_agents_cannot_speak_for_one_node_while_the_first_is_heard(store):
    store.take(report())
    assert refusal(store.take, report(source="http://other", at=500.0)) is Refusal.DUPLICATE
    store.lost("n1", "http://agent")
    store.take(report(source="http://other", at=500.0))
    assert store.get("n1").source == "http://other"


def status_report(at):
    said = report(source="WorkerStatus", at=at)
    return replace(said, live=False, from_status=True)


def test_a_worker_status_replaces_only_an_agent_that_is_silent_for_long(store):
    store.take(report(at=100.0))
    assert refusal(store.take, status_report(200.0)) is Refusal.DUPLICATE
    store.lost("n1", "http://agent")
    assert refusal(store.take, status_report(129.0)) is Refusal.DUPLICATE
    assert store.take(status_report(131.0)).report.from_status
    store.take(report(at=132.0))
    assert not store.get("n1").from_status


def test_pods_are_covered_once(store):
    first = store.take(report(pods=("a", "b")))
    second = store.take(report(pods=("b", "c"), seq=2))
    assert (pods_newly_covered(first), pods_newly_covered(second)) == ({"a", "b"}, {"c"})


def test_old_reports_are_found(store):
    store.take(report("n1", at=1.0))
    store.take(report("n2", at=9.0))
    assert store.older_than(5.0) == ["n1"]
    assert store.drop("n1").summary.node == "n1"
    assert len(store) == 1
