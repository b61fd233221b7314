"""Answers of the ingress itself: OpenAI's envelope, headers, and events that end a stream."""

import json

import pytest

from nearkv.ingress import errors
from nearkv.ingress.answers import error_body, error_event, error_response, is_event_stream


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.RequestError("m"), 400, "BadRequestError"),
        (errors.UnknownModelError("m"), 404, "NotFoundError"),
        (errors.BodyTooLargeError("m"), 413, "RequestTooLargeError"),
        (errors.NoRoomError("m", retry_after_seconds=3), 429, "RateLimitError"),
        (errors.NoEngineError("m"), 503, "ServiceUnavailableError"),
        (errors.EngineFailedError("m"), 502, "BadGatewayError"),
        (errors.EngineTimeoutError("m"), 504, "GatewayTimeoutError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_has_its_envelope(error, status, kind):
    answer = error_response(error, request_id="r1")
    assert answer.status == status
    assert answer.content_type == "application/json"
    assert json.loads(answer.body) == {
        "error": {"message": "m", "type": kind, "param": None, "code": status}
    }
    assert answer.headers["x-nearkv-engine"] == "none"
    assert answer.headers["x-nearkv-reason"] == error.reason
    assert ("Retry-After" in answer.headers) == (status == 429)


def test_no_room_says_when_to_come_back():
    answer = error_response(errors.NoRoomError("full", retry_after_seconds=3), request_id="r1")
    assert answer.headers["Retry-After"] == "3"


def test_the_field_at_fault_is_named():
    body = json.loads(error_body(errors.RequestError("bad", param="prompt")))
    assert body["error"]["param"] == "prompt"


def test_an_error_says_that_no_engine_answered_and_to_which_request():
    answer = error_response(errors.EngineFailedError("m"), request_id="r1")
    assert answer.headers["x-nearkv-engine"] == "none"
    assert answer.headers["X-Request-Id"] == "r1"


@pytest.mark.parametrize(
    "text", ['a "quote"', "two\nlines\r\n\r\ndata: forged", "\u2028", "ünï", "\x00"]
)
def test_an_error_event_is_one_event_whatever_the_message(text):
    event = error_event(errors.EngineFailedError(text))
    assert event.startswith(b"\n\ndata: ")
    assert event.endswith(b"\n\n")
    (line,) = event.strip(b"\n").splitlines()
    assert json.loads(line.removeprefix(b"data: "))["error"]["message"] == text


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/event-stream", True),
        ("text/event-stream; charset=utf-8", True),
        ("application/json", False),
        ("", False),
    ],
)
def test_event_streams_are_known_by_their_type(content_type, expected):
    assert is_event_stream(content_type) is expected


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.RequestError("m"), 400, "invalid_request_error"),
        (errors.KeyRefusedError("m"), 401, "authentication_error"),
        (errors.NotRoutedError("m"), 403, "permission_error"),
        (errors.ResponseGoneError("m"), 404, "not_found_error"),
        (errors.BodyTooLargeError("m"), 413, "request_too_large"),
        (errors.NoRoomError("m", retry_after_seconds=3), 429, "rate_limit_error"),
        (errors.IngressError("m"), 500, "api_error"),
        (errors.EngineFailedError("m"), 502, "api_error"),
        (errors.NoEngineError("m"), 503, "overloaded_error"),
        (errors.EngineTimeoutError("m"), 504, "timeout_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_messages_have_anthropic_s_envelope(error, status, kind):
    answer = error_response(error, request_id="r1", path="/v1/messages/count_tokens")
    assert answer.status == status
    assert json.loads(answer.body) == {"type": "error", "error": {"type": kind, "message": "m"}}


@pytest.mark.parametrize("text", ["m", "two\nlines\n\nevent: forged"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_error_event_of_the_newer_apis_has_a_name(path, text):
    event = error_event(errors.EngineFailedError(text), path)
    assert event.startswith(b"\n\nevent: error\ndata: ")
    assert event.endswith(b"\n\n")
    _, data = event.strip(b"\n").splitlines()
    told = json.loads(data.removeprefix(b"data: "))
    assert told["type"] == "error"
    assert told["error"]["message"] == text
    assert path == "/v1/messages" or (told["code"], told["message"]) == ("engine_failed", text)
