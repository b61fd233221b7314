"""Request heads and where they go."""

import pytest

from nearkv.ingress.upstream.heads import Origin, encode_head, origin_of


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://10.0.0.1:8000", Origin("10.0.0.1", 8000, "10.0.0.1:8000", is_tls=False, path="")),
        ("http://e", Origin("e", 80, "e", is_tls=False, path="")),
        ("https://e/", Origin("e", 443, "e", is_tls=True, path="")),
        ("http://[::1]:8000/base/", Origin("::1", 8000, "[::1]:8000", is_tls=False, path="/base")),
        ("http://user:word@e:1", Origin("e", 1, "e:1", is_tls=False, path="")),
    ],
)
def test_a_url_names_an_origin(url, origin):
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "",
        "e:8000",
        "ftp://e",
        "http://",
        "http://e:port",
        "http://[e",
        "http://a..b",
        "http://e/a b",
        f"http://{'a' * 64}.b",
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url):
    with pytest.raises(ValueError, match=r"."):
        origin_of(url)


def test_a_head_names_host_and_length_and_keeps_headers_as_they_are():
    headers = [("X-A", "1"), ("x-a", "2"), ("X-Bytes", "\udcff")]
    assert encode_head("POST", origin_of("http://e:1/base"), "/v1/x?q=1", headers, 3) == (
        b"POST /base/v1/x?q=1 HTTP/1.1\r\nHost: e:1\r\nContent-Length: 3\r\n"
        b"X-A: 1\r\nx-a: 2\r\nX-Bytes: \xff\r\n\r\n"
    )
    assert b"Length" not in encode_head("GET", origin_of("http://e"), "/", [], None)


@pytest.mark.parametrize("text", ["a\r\nX-B: 1", "a\nb", "a\rb", "a\0b"])
def test_nothing_breaks_out_of_its_line(text):
    origin = origin_of("http://e")
    for target, headers in (("/", [("X-A", text)]), ("/", [(text, "a")]), (text, [])):
        with pytest.raises(ValueError, match="line break"):
            encode_head("GET", origin, target, headers, None)
