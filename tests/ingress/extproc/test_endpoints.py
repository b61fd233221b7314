"""Endpoints: from engines' URLs and a pool's members."""

import pytest

from nearkv.ingress.extproc.endpoints import (
    Membership,
    address_of,
    endpoint_of,
    host_port,
    is_within,
    unknown_members,
)

POOL = Membership({"10.0.0.1": (8000,), "fd00::1": (8000,)}, {"10.0.0.1": "a", "fd00::1": "b"})
RANKS = Membership({"10.0.0.1": (8000, 8001)}, {"10.0.0.1": "a"})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", ("10.0.0.1", 8000)),
        ("http://10.0.0.1", ("10.0.0.1", 80)),
        ("https://[fd00::1]/x", ("fd00::1", 443)),
        ("http://engine:8000", None),
        ("http://10.0.0.1:99999", None),
        ("ftp://10.0.0.1", None),
        ("nonsense", None),
    ],
)
def test_urls_name_addresses_or_nothing(url, address):
    assert address_of(url) == address


@pytest.mark.parametrize(
    ("url", "pool", "endpoint"),
    [
        ("http://10.0.0.1:8000", None, "10.0.0.1:8000"),
        ("http://[fd00::1]:8000", None, "[fd00::1]:8000"),
        ("http://engine:8000", None, ""),
        ("http://10.0.0.1:8000", POOL, "10.0.0.1:8000"),
        ("http://10.0.0.1:8200", POOL, "10.0.0.1:8000"),
        ("http://[fd00::1]:8200", POOL, "[fd00::1]:8000"),
        ("http://10.0.0.2:8000", POOL, ""),
        ("http://10.0.0.1:8001", RANKS, "10.0.0.1:8001"),
        ("http://10.0.0.1:8200", RANKS, ""),
    ],
)
def test_an_engine_is_reached_by_its_own_port_or_by_the_sidecars(url, pool, endpoint):
    assert endpoint_of(url, pool) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "subset", "within"),
    [
        ("10.0.0.1:8000", None, True),
        ("10.0.0.1:8000", {"10.0.0.1:8000"}, True),
        ("10.0.0.1:8000", {"10.0.0.1"}, True),
        ("[fd00::1]:8000", {"fd00::1"}, True),
        ("10.0.0.1:8000", {"10.0.0.1:8001", "10.0.0.11"}, False),
        ("10.0.0.1:8000", set(), False),
    ],
)
def test_a_subset_names_endpoints_or_addresses(endpoint, subset, within):
    assert is_within(endpoint, subset) is within


def test_members_that_no_engine_stands_for_are_named():
    assert unknown_members(POOL, ["10.0.0.1:8000"]) == [("b", "[fd00::1]:8000")]
    assert unknown_members(POOL, ["10.0.0.1:8000", "[fd00::1]:8000"]) == []
    assert unknown_members(RANKS, ["10.0.0.1:8000"]) == [("a:8001", "10.0.0.1:8001")]


def test_all_endpoints_of_a_pool():
    assert RANKS.endpoints() == ["10.0.0.1:8000", "10.0.0.1:8001"]
    assert host_port("::1", 1) == "[::1]:1"
