"""What is kept of a node."""

import pytest

from nearkv.extender.view.cluster import levels_reader
from nearkv.extender.view.nodes import NodeRules, NodeStore, read_node
from tests.doubles.api_server import node_object
from tests.extender.view.things import LEVELS, as_node, facts

RULES = NodeRules(levels_of=levels_reader(LEVELS), resources=("nvidia.com/gpu", "amd.com/gpu"))
NFD = "feature.node.kubernetes.io/rdma.available"


def read(rules=RULES, allocatable=None, **fields):
    value = node_object("n", **fields)
    value["status"]["allocatable"] |= allocatable or {}
    return read_node(as_node(value), rules)


def test_levels_come_from_labels_nearest_first_and_missing_is_empty():
    assert read(labels={"zone": "z1"}).levels == ("", "z1")


def test_devices_of_all_managed_resources_add_up():
    assert read(allocatable={"amd.com/gpu": "2"}).devices == 10
    assert read(gpus=0).devices == 0


@pytest.mark.parametrize(
    ("labels", "allocatable", "rdma"),
    [
        ({}, {}, -1),
        ({NFD: "true"}, {}, 1),
        ({NFD: "false"}, {}, 0),
        ({NFD: ""}, {}, -1),
        ({}, {"rdma/hca_shared": "63"}, 1),
        ({}, {"rdma/hca_shared": "0"}, 0),
        ({NFD: "false"}, {"rdma/hca": "1"}, 1),
    ],
)
def test_rdma_is_known_only_where_something_speaks_of_it(labels, allocatable, rdma):
    assert read(labels=labels, allocatable=allocatable).rdma == rdma


def test_rdma_labels_and_resources_are_as_configured():
    rules = NodeRules(
        levels_of=levels_reader(LEVELS), rdma_labels=("ib",), rdma_resources=("nvidia.com/vf",)
    )
    assert read(rules, labels={"ib": "yes"}).rdma == 1
    assert read(rules, allocatable={"nvidia.com/vf": "8"}).rdma == 1
    assert read(rules, labels={NFD: "true"}, allocatable={"rdma/hca": "1"}).rdma == -1


def test_a_count_that_is_no_quantity_is_an_error():
    with pytest.raises(ValueError, match="no quantity"):
        read(allocatable={"amd.com/gpu": "many"})


def test_the_address_is_the_internal_one():
    assert read(internal_ip="10.0.0.7").host_ip == "10.0.0.7"


def test_only_changes_that_count_are_changes():
    store = NodeStore()
    assert store.put(facts("a", "r1"))
    assert not store.put(facts("a", "r1"))
    assert store.put(facts("a", "r2"))
    assert (store.drop("a"), store.drop("a")) == (True, False)


def test_a_list_names_what_changed_and_what_is_gone():
    store = NodeStore()
    store.replace([facts("a"), facts("b"), facts("c")])
    changed, gone = store.replace([facts("b"), facts("c", "r1"), facts("d")])
    assert ([each.name for each in changed], gone) == (["c", "d"], ["a"])
    assert {each.name for each in store} == {"b", "c", "d"}
