"""Reading and printing addresses."""

import pytest

from nearkv.settings import Address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        pytest.param("localhost:8080", "localhost", 8080, id="name"),
        pytest.param("127.0.0.1:0", "127.0.0.1", 0, id="port-zero"),
        pytest.param("[::1]:65535", "::1", 65535, id="ipv6"),
        pytest.param("[fe80::1%eth0]:80", "fe80::1%eth0", 80, id="ipv6-zone"),
        pytest.param("nearkv-ingress.ns.svc:80", "nearkv-ingress.ns.svc", 80, id="service"),
    ],
)
def test_an_address_is_read_and_printed_alike(text, host, port):
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text
    assert address.url == f"http://{text}"


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":80", "host:", "host:-1", "host:65536", "::1:80", "[::1]", "a b:1", "h:1/x"],
)
def test_what_is_no_address_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"address|65535"):
        parse_address(text)
