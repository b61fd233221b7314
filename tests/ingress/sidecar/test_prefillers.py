"""Who may be asked to prefill."""

import pytest

from nearkv.ingress.extproc.endpoints import Membership
from nearkv.ingress.sidecar.prefillers import Allowed, named_prefillers
from nearkv.ingress.sidecar.settings import SidecarSettings

POOL = Membership({"10.1.0.1": (8000, 8001)}, {"10.1.0.1": "a"})


@pytest.mark.parametrize(
    ("allowed", "name", "yes"),
    [
        (["10.0.0.1:8000"], "10.0.0.1:8000", True),
        (["10.0.0.1:8000"], "10.0.0.1:8001", False),
        (["engine:8000"], "engine:8000", True),
        (["10.0.0.0/8"], "10.9.9.9:1", True),
        (["10.0.0.0/8"], "11.0.0.1:1", False),
        (["10.0.0.0/8"], "engine:8000", False),
        (["10.0.0.0/8"], "[fd00::1]:8000", False),
        (["fd00::/8"], "[fd00::1]:8000", True),
        ([], "10.0.0.1:8000", False),
    ],
)
def test_hosts_by_name_and_addresses_by_network(allowed, name, yes):
    assert Allowed.of(allowed).allows(name, None) is yes


@pytest.mark.parametrize(
    ("name", "yes"),
    [("10.1.0.1:8000", True), ("10.1.0.1:8002", False), ("10.1.0.2:8000", False)],
)
def test_members_of_the_pool_on_its_ports(name, yes):
    assert Allowed.of([]).allows(name, POOL) is yes


@pytest.mark.parametrize("name", ["", "x", "10.0.0.1:0", "10.0.0.1:99999", "a b:1", "u@h:1", "/:1"])
def test_what_names_no_host_is_an_error(name):
    with pytest.raises(ValueError, match=r"address|port"):
        Allowed.of(["10.0.0.0/8"]).allows(name, POOL)


def test_only_the_first_two_of_a_header_are_tried():
    assert named_prefillers(" a:1 ,, b:2,c:3") == ["a:1", "b:2"]
    assert named_prefillers(" ,") == []


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.0/99", "10.0.0.1/8", "h:0", "h:x"])
def test_settings_refuse_what_could_never_match(text):
    with pytest.raises(ValueError, match="prefillers"):
        SidecarSettings(prefillers=(text,))
