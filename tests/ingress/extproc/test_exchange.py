"""One exchange: the request held back until it is whole, then sent on; the answer let pass."""

import pytest

from nearkv.ingress.errors import BodyTooLargeError
from nearkv.ingress.extproc.exchange import Exchange, ModeError, Stage
from nearkv.ingress.extproc.messages import decode_message
from nearkv.ingress.extproc.picking import Pick
from nearkv.protobuf import fields_of
from tests.ingress.extproc import wire_messages as wire

PICK = Pick(endpoint="10.0.0.1:8000", request_id="r")
FULL_DUPLEX, BUFFERED = (4, 4), (2, 2)


def exchange_of(*messages, limit_bytes=1000):
    exchange = Exchange(limit_bytes)
    answers = [a for m in messages for a in exchange.take_request(decode_message(m))]
    return exchange, answers


def fields(data):
    return [(n, c if isinstance(c, int) else bytes(c)) for n, c in fields_of(memoryview(data))]


def inner(data, *path):
    for number in path:
        data = dict(fields(data))[number]
    return data


def set_headers(answer):
    """Return the headers that an answer to the request sets, and those it removes."""
    common = dict(fields(inner(answer, fields(answer)[0][0], 1)))
    given, removed = {}, []
    for number, content in fields(common[2]):
        if number == 1:
            header = dict(fields(inner(content, 1)))
            given[header[1].decode()] = header[3].decode()
        else:
            removed.append(content.decode())
    return given, removed


def test_nothing_is_answered_before_the_request_is_whole():
    exchange, answers = exchange_of(wire.request_headers(), wire.body(b"ab"), wire.body(b"c"))
    assert (exchange.stage, answers) == (Stage.REQUEST, [])
    exchange.take_request(decode_message(wire.body(b"", ends=True)))
    assert exchange.stage is Stage.PICKING
    assert exchange.asked(0.0).body == b"abc"


def test_a_request_without_a_body_is_whole_with_its_head():
    exchange, _ = exchange_of(
        wire.request_headers({":method": "GET", ":path": "/x?y=1"}, ends=True)
    )
    asked = exchange.asked(0.0)
    assert (exchange.stage, asked.method, asked.path) == (Stage.PICKING, "GET", "/x")
    assert len(list(exchange.send_on(PICK, asked.body))) == 1


def test_a_body_that_ends_with_trailers_is_sent_on_with_trailers():
    exchange, _ = exchange_of(wire.request_headers(), wire.body(b"ab"), wire.trailers())
    assert exchange.stage is Stage.PICKING
    _, body, trailers = exchange.send_on(PICK, b"ab")
    assert inner(body, 3, 1, 3, 3) == b"\x0a\x02ab"  # not the end of the stream
    assert fields(trailers) == [(5, b"")]


@pytest.mark.parametrize("size_bytes", [0, 1, 61_999, 62_000, 62_001, 200_000])
def test_a_body_is_sent_on_in_pieces_of_a_size_that_every_envoy_takes(size_bytes):
    body = bytes(range(256)) * (size_bytes // 256 + 1)
    body = body[:size_bytes]
    exchange, _ = exchange_of(
        wire.request_headers(), wire.body(body, ends=True), limit_bytes=1 << 20
    )
    _, *pieces = exchange.send_on(PICK, body)
    streamed = [dict(fields(inner(piece, 3, 1, 3, 3))) for piece in pieces]
    assert b"".join(piece.get(1, b"") for piece in streamed) == body
    assert all(len(piece.get(1, b"")) <= 62_000 for piece in streamed)
    assert [2 in piece for piece in streamed] == [False] * (len(pieces) - 1) + [True]


def test_the_pick_is_in_the_header_and_in_the_metadata():
    exchange, _ = exchange_of(wire.request_headers(), wire.body(b"", ends=True))
    pick = Pick("10.0.0.1:1", "r", others=("10.0.0.2:2",), prefiller="10.0.0.3:3", dp_rank=0)
    head = next(exchange.send_on(pick, b""))
    given, removed = set_headers(head)
    assert given == {
        "x-gateway-destination-endpoint": "10.0.0.1:1,10.0.0.2:2",
        "x-request-id": "r",
        "x-prefiller-host-port": "10.0.0.3:3",
        "x-data-parallel-rank": "0",
    }
    assert "x-gateway-destination-endpoint-subset" in removed
    assert b"envoy.lb" in inner(head, 8)
    assert b"10.0.0.1:1,10.0.0.2:2" in inner(head, 8)


def test_headers_that_name_hosts_or_ranks_are_removed_where_the_picker_names_none():
    exchange, _ = exchange_of(wire.request_headers(ends=True))
    _, removed = set_headers(next(exchange.send_on(PICK, b"")))
    assert {"x-prefiller-host-port", "x-data-parallel-rank", "x-encoder-hosts-ports"} <= {*removed}


def test_a_buffered_body_is_asked_for_and_answered_in_one_piece():
    exchange, answers = exchange_of(wire.request_headers(modes=BUFFERED))
    assert [fields(a)[0][0] for a in answers] == [1]
    exchange.take_request(decode_message(wire.body(b"ab", ends=True)))
    (answer,) = exchange.send_on(PICK, b"ab")
    assert fields(answer)[0][0] == 3
    assert set_headers(answer)[0]["x-gateway-destination-endpoint"] == PICK.endpoint


@pytest.mark.parametrize("mode", [0, 1, 3, 5])
def test_other_body_modes_are_refused(mode):
    with pytest.raises(ModeError, match="FULL_DUPLEX_STREAMED"):
        exchange_of(wire.request_headers(modes=(mode, 0)))
    exchange, _ = exchange_of(wire.request_headers(modes=(mode, 0), ends=True))
    assert exchange.stage is Stage.PICKING  # there is no body to show


def test_a_body_over_the_limit_is_refused_by_its_declaration_or_its_size():
    with pytest.raises(BodyTooLargeError, match="1001"):
        exchange_of(wire.request_headers({"content-length": "1001"}))
    with pytest.raises(BodyTooLargeError):
        exchange_of(wire.request_headers(), wire.body(b"x" * 600), wire.body(b"x" * 401))
    exchange_of(wire.request_headers({"content-length": "nonsense"}), wire.body(b"x" * 1000))


@pytest.mark.parametrize(
    ("hint", "endpoints"),
    [
        ({}, None),
        ({"x-gateway-destination-endpoint-subset": "a:1,b:2"}, {"a:1", "b:2"}),
        ({"x-gateway-destination-endpoint-subset": ""}, set()),
        ({"other": "x"}, None),
    ],
)
def test_a_restriction_that_is_empty_is_not_none(hint, endpoints):
    metadata = {"envoy.lb.subset_hint": hint} if hint else {}
    exchange, _ = exchange_of(wire.request_headers(ends=True, metadata=metadata))
    assert exchange.asked(0.0).endpoints == endpoints


def answered(*messages, modes=FULL_DUPLEX):
    exchange, _ = exchange_of(wire.request_headers(modes=modes, ends=True))
    for message in messages:
        exchange.note_answer(decode_message(message))
    return exchange


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, ""),
        ({"attributes": {"x": {"upstream.address": "10.0.0.2:2"}}}, "10.0.0.2:2"),
        (
            {
                "metadata": {"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.1:1"}},
                "attributes": {"x": {"upstream.address": "10.0.0.2:2"}},
            },
            "10.0.0.1:1",
        ),
    ],
)
def test_who_served_is_the_gateways_word_or_where_envoy_connected_to(given, served):
    head = answered(wire.response_headers(**given)).head
    assert (head.status, head.served) == (200, served)


def test_the_last_bytes_of_the_answer_are_kept():
    exchange = answered(
        wire.response_headers(),
        wire.body(b"a" * 5000, answer=True),
        wire.body(b"end", answer=True, ends=True),
    )
    assert len(exchange.tail) == 4096
    assert exchange.tail.endswith(b"aend")
    assert exchange.outcome == "complete"


def test_how_an_exchange_ended_is_told_apart():
    head, piece = wire.response_headers(), wire.body(b"x", answer=True)
    assert answered(head, piece).outcome == "broken_off"
    assert answered(head, modes=(4, 0)).outcome == "not_shown"
    assert answered(modes=(4, 0)).outcome == "broken_off"
    assert answered(wire.response_headers(ends=True)).outcome == "complete"
    assert answered(head, wire.trailers(answer=True)).outcome == "complete"


@pytest.mark.parametrize(("modes", "streams"), [((4, 4), True), ((4, 1), False), ((2, 2), False)])
def test_the_answer_passes_in_the_way_of_its_mode(modes, streams):
    exchange = answered(modes=modes)
    answer = exchange.let_pass(decode_message(wire.body(b"x", answer=True)))
    assert (b"x" in answer) is streams
    assert fields(answer)[0][0] == 4
