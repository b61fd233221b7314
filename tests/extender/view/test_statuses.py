"""WorkerStatus read tolerantly, as a stand-in for agents."""

import msgspec
import pytest

from nearkv.extender.view.statuses import StatusStore, read_status
from nearkv.kube.objects import WorkerStatus
from tests.doubles.api_server import worker_status_object

FULL = {
    "node": "n1",
    "intervalSeconds": 120,
    "devices": [{"id": "GPU-0", "totalBytes": 80, "usedBytes": 8, "health": "ok"}],
    "groups": [{"group": "g", "engines": 1, "heldBytes": 5, "roles": ["decode"]}],
    "paths": [{"source": "n2", "transport": "tcp", "setupSeconds": 0.1, "bytesPerSecond": 1e9}],
    "conditions": [{"type": "Ready", "status": "True"}],
}


def read(status, name="w"):
    return read_status(msgspec.convert(worker_status_object(name, status), Seen).as_status())


class Seen(msgspec.Struct):
    metadata: dict
    status: object

    def as_status(self):
        given = {"metadata": self.metadata, "status": self.status}
        return msgspec.json.decode(msgspec.json.encode(given), type=WorkerStatus)


def test_the_same_facts_are_read_as_from_an_agent():
    summary = read(FULL).summary
    assert (summary.node, summary.interval_seconds) == ("n1", 120.0)
    assert (summary.devices[0].total_bytes, summary.groups[0].held_bytes) == (80, 5)
    assert summary.paths[0].bytes_per_second == 1e9


def test_names_may_be_written_either_way():
    summary = read({"nodeName": "n1", "groups": [{"group": "g", "held_bytes": 5}]}).summary
    assert (summary.node, summary.groups[0].held_bytes, summary.interval_seconds) == ("n1", 5, 300)


def test_a_field_that_makes_no_sense_costs_only_itself():
    summary = read(FULL | {"devices": "many", "rdma": [1]}).summary
    assert (summary.devices, summary.rdma, summary.groups[0].held_bytes) == (None, None, 5)


@pytest.mark.parametrize(
    "status",
    [None, [], "ok", {}, {"node": 5}, {"node": ""}, {"node": "n" * 500}],
)
def test_a_status_without_a_node_says_nothing(status):
    assert read(status).summary is None


def test_a_status_that_cannot_be_true_says_nothing():
    assert read(FULL | {"groups": [{"group": "g", "heldBytes": -1}]}).summary is None
    assert read_status(WorkerStatus(status=msgspec.Raw(b"[" * 100_000))).summary is None


def test_objects_of_one_node_add_up():
    store = StatusStore()
    store.put(read(FULL, "a"), 1.0)
    store.put(
        read({"node": "n1", "groups": [{"group": "g", "heldBytes": 2, "engines": 2}]}, "b"), 9.0
    )
    merged, received_at = store.of_node("n1")
    assert (merged.groups[0].held_bytes, merged.groups[0].engines) == (7, 3)
    assert (merged.devices[0].id, merged.interval_seconds) == ("GPU-0", 300.0)
    assert received_at == 1.0


def test_what_is_gone_or_says_nothing_any_more_does_not_count():
    store = StatusStore()
    store.put(read(FULL, "a"), 1.0)
    store.put(read({}, "a"), 2.0)
    assert (store.of_node("n1"), len(store), list(store.nodes)) == (None, 0, [])
    store.put(read(FULL, "a"), 3.0)
    store.drop(("default", "a"))
    assert len(store) == 0


def test_a_list_keeps_the_time_of_what_did_not_change():
    store = StatusStore()
    store.replace([read(FULL, "a"), read(FULL | {"node": "n2"}, "b")], 1.0)
    store.replace([read(FULL, "a"), read(FULL | {"node": "n3"}, "c")], 9.0)
    assert store.of_node("n1")[1] == 1.0
    assert store.of_node("n2") is None
    assert store.of_node("n3")[1] == 9.0
