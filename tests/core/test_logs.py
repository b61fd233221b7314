"""Logs: the form of a line, and that nothing a caller logs can hurt it."""

import io
import json
import logging
import warnings
from pathlib import Path

import pytest
import structlog

from nearkv.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


@pytest.fixture
def logged(stream):
    def read_events():
        return [json.loads(line) for line in stream.buffer.getvalue().splitlines()]

    return read_events


def test_an_event_is_one_json_line_with_what_every_event_carries(stream, logged):
    configure_logging(component="agent", stream=stream)
    structlog.get_logger().info("engine_found", engine="a", blocks=3, text="é\nü")
    (event,) = logged()
    assert list(event) == ["timestamp", "level", "component", "event", "engine", "blocks", "text"]
    assert event["timestamp"].endswith("Z")
    assert (event["level"], event["component"], event["text"]) == ("info", "agent", "é\nü")


def test_events_below_the_level_are_dropped(stream, logged):
    configure_logging(component="agent", level="warning", stream=stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().error("loud")
    assert [event["event"] for event in logged()] == ["loud"]


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="unknown log level 'loud'; known: debug, info"):
        configure_logging(component="agent", level="loud")


def test_an_exception_is_rendered_with_its_traceback(stream, logged):
    configure_logging(component="agent", stream=stream)
    try:
        {}["lost"]
    except KeyError:
        structlog.get_logger().exception("scrape_failed")
    (event,) = logged()
    assert event["level"] == "error"
    assert event["exception"].endswith("KeyError: 'lost'")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param(Path("a"), "PosixPath('a')", id="object"),
        pytest.param("\udcff", None, id="lone-surrogate"),
        pytest.param({(1, 2): 3}, None, id="odd-key"),
        pytest.param(2**80, None, id="huge-number"),
        pytest.param(float("nan"), None, id="nan"),
    ],
)
def test_no_value_makes_a_log_call_fail(stream, logged, value, shown):
    configure_logging(component="agent", stream=stream)
    structlog.get_logger().info("odd", value=value)
    (event,) = logged()
    assert shown is None or event["value"] == shown


def test_standard_library_records_take_the_same_form(stream, logged):
    configure_logging(component="ingress", stream=stream)
    logging.getLogger("aiohttp.server").error("Error %s", "here", exc_info=ValueError("x"))
    (event,) = logged()
    assert (event["component"], event["level"]) == ("ingress", "error")
    assert (event["event"], event["logger"]) == ("Error here", "aiohttp.server")
    assert event["exception"].endswith("ValueError: x")


def test_warnings_become_events(stream, logged):
    configure_logging(component="agent", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old thing", stacklevel=1)
    (event,) = logged()
    assert (event["level"], event["logger"]) == ("warning", "py.warnings")


def test_bound_context_reaches_the_event(stream, logged):
    configure_logging(component="ingress", stream=stream)
    structlog.get_logger().bind(request_id="r1").info("routed")
    assert logged()[0]["request_id"] == "r1"


@pytest.mark.parametrize(
    ("no_color", "coloured"),
    [pytest.param("", True, id="colour"), pytest.param("1", False, id="no-color")],
)
def test_a_terminal_gets_lines_for_people(monkeypatch, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    configure_logging(component="agent", stream=terminal)
    structlog.get_logger().info("engine_found", engine="a")
    logging.getLogger("aiohttp").warning("odd")
    lines = terminal.getvalue().splitlines()
    assert ["engine_found" in lines[0], "odd" in lines[1]] == [True, True]
    assert ("\x1b[" in terminal.getvalue()) is coloured
