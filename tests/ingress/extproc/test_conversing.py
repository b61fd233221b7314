"""Streams from their first message to their last, with a scripted Envoy and picker."""

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from nearkv.ingress.bodies import BodyRoom
from nearkv.ingress.errors import NoEngineError, NoRoomError
from nearkv.ingress.extproc.conversing import Conversation
from nearkv.ingress.extproc.metrics import ExtProcMetrics
from nearkv.ingress.extproc.picking import Pick
from nearkv.ingress.settings import IngressSettings
from nearkv.protobuf import WireError, fields_of
from tests.ingress.extproc import wire_messages as wire


class ScriptedCall:
    """An Envoy that sends what it was given, then closes, or breaks off."""

    def __init__(self, *messages, breaks=False, stalls=False, refuses_from=None):
        self.stalls = stalls
        self.given = messages
        self.breaks = breaks
        self.sent = []
        self.refuses_from = refuses_from

    async def messages(self):
        for message in self.given:
            yield message
        if self.stalls:
            await asyncio.Event().wait()
        if self.breaks:
            raise asyncio.CancelledError

    async def send(self, answer):
        if self.refuses_from is not None and len(self.sent) >= self.refuses_from:
            raise asyncio.CancelledError
        self.sent.append(answer)


class NotingTicket:
    def __init__(self):
        self.pick = Pick("10.0.0.1:1", "r", others=("10.0.0.2:2",))
        self.events = []

    def answered(self, head):
        self.events.append(("answered", head.status, head.served))
        return [("x-ours", "1")]

    def began(self):
        self.events.append("began")

    def close(self, tail, *, complete):
        self.events.append(("closed", tail, complete))


class NotingPicker:
    def __init__(self, error=None):
        self.error = error
        self.asked = []
        self.is_full = False
        self.refusals = []
        self.ticket = NotingTicket()

    def check_room(self):
        if self.is_full:
            raise NoRoomError("full", retry_after_seconds=1)

    def refused(self, error):
        self.refusals.append(error.reason)

    async def pick(self, asked):
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return self.ticket


async def converse(call, picker, *, body_seconds=10.0, bodies=None):
    registry = CollectorRegistry()
    conversation = Conversation(
        picker,
        ExtProcMetrics(registry),
        bodies=bodies or BodyRoom(IngressSettings()),
        limit_bytes=100,
        body_seconds=body_seconds,
    )
    await conversation.serve(call)
    return generate_latest(registry).decode()


def immediate(answer):
    ((number, content),) = fields_of(memoryview(answer))
    assert number == 7
    found = {}
    for place, part in fields_of(content):
        found[place] = part if isinstance(part, int) else bytes(part)
    return dict(fields_of(memoryview(found[1])))[1], json.loads(found[3]), found[2]


REQUEST = (wire.request_headers(), wire.body(b"{}", ends=True))
ANSWER = (
    wire.response_headers(attributes={"x": {"upstream.address": "10.0.0.2:2"}}),
    wire.body(b"", answer=True),
    wire.body(b"one", answer=True),
    wire.body(b"two", answer=True, ends=True),
)


async def test_a_whole_exchange():
    call, picker = ScriptedCall(*REQUEST, *ANSWER), NotingPicker()
    counts = await converse(call, picker)
    assert picker.asked[0].body == b"{}"
    assert picker.ticket.events == [
        ("answered", 200, "10.0.0.2:2"),
        "began",
        ("closed", b"onetwo", True),
    ]
    assert len(call.sent) == 2 + len(ANSWER)
    assert b"x-ours" in call.sent[2]
    assert 'streams_total{outcome="complete"} 1.0' in counts
    assert 'served_total{by="fallback"} 1.0' in counts


@pytest.mark.parametrize("messages", [(), REQUEST[:1]])
async def test_a_client_that_leaves_before_its_request_is_whole_is_not_picked_for(messages):
    picker = NotingPicker()
    with pytest.raises(asyncio.CancelledError):
        await converse(ScriptedCall(*messages, breaks=True), picker)
    await converse(ScriptedCall(*messages), picker)
    assert picker.asked == []


@pytest.mark.parametrize("count", range(len(ANSWER)))
async def test_the_ticket_is_closed_wherever_the_stream_breaks(count):
    picker = NotingPicker()
    with pytest.raises(asyncio.CancelledError):
        await converse(ScriptedCall(*REQUEST, *ANSWER[:count], breaks=True), picker)
    assert picker.ticket.events[-1][0] == "closed"
    assert picker.ticket.events[-1][2] is False


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
async def test_the_ticket_is_closed_wherever_an_answer_cannot_be_sent(accepted):
    picker = NotingPicker()
    with pytest.raises(asyncio.CancelledError):
        await converse(ScriptedCall(*REQUEST, *ANSWER, refuses_from=accepted), picker)
    assert picker.ticket.events[-1][0] == "closed"


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (NoEngineError("nobody"), 503, b"rejected-no-endpoints"),
        (NoRoomError("full", retry_after_seconds=7), 429, b"retry-after"),
        (ZeroDivisionError("a defect"), 500, b"internal_error"),
    ],
)
async def test_errors_are_answers_in_the_envelope_and_defects_tell_nothing(error, status, header):
    call, picker = ScriptedCall(*REQUEST), NotingPicker(error)
    counts = await converse(call, picker)
    (answer,) = call.sent
    found, body, headers = immediate(answer)
    assert (found, body["error"]["code"]) == (status, status)
    assert header in headers
    assert "defect" not in body["error"]["message"]
    assert 'streams_total{outcome="refused"} 1.0' in counts


async def test_a_body_over_the_limit_is_refused_at_once():
    call, picker = ScriptedCall(wire.request_headers(), wire.body(b"x" * 101)), NotingPicker()
    await converse(call, picker)
    assert immediate(call.sent[0])[0] == 413
    assert picker.refusals == ["body_too_large"]
    assert picker.asked == []


async def test_bodies_have_room_together_and_give_it_back():
    bodies = BodyRoom(IngressSettings(limits={"max_bodies_bytes": 50}))
    others = bodies.hold()
    others.take(49)
    call = ScriptedCall(*REQUEST)
    picker = NotingPicker()
    await converse(call, picker, bodies=bodies)
    assert immediate(call.sent[0])[0] == 429
    assert (picker.asked, bodies.taken_bytes) == ([], 49)
    others.release()
    await converse(ScriptedCall(*REQUEST, *ANSWER), picker, bodies=bodies)
    assert len(picker.asked) == 1
    assert bodies.taken_bytes == 0


async def test_what_is_no_message_is_an_error_and_closes_the_ticket():
    picker = NotingPicker()
    with pytest.raises(WireError):
        await converse(ScriptedCall(*REQUEST, b"\xff"), picker)
    assert picker.ticket.events[-1][0] == "closed"


async def test_messages_about_nothing_we_know_are_passed_over():
    picker = NotingPicker()
    await converse(ScriptedCall(b"", *REQUEST, b"", *ANSWER), picker)
    assert picker.ticket.events[-1] == ("closed", b"onetwo", True)


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever():
    call = ScriptedCall(wire.request_headers(), stalls=True)
    picker = NotingPicker()
    await converse(call, picker, body_seconds=0.01)
    assert immediate(call.sent[0])[0] == 408
    assert picker.asked == []


async def test_a_picker_that_is_full_refuses_before_the_body_comes():
    call, picker = ScriptedCall(wire.request_headers(), stalls=True), NotingPicker()
    picker.is_full = True
    await converse(call, picker)
    assert immediate(call.sent[0])[0] == 429
