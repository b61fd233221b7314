"""Structured logs: JSON lines in pods, coloured lines on a terminal, on standard error.

Modules log with ``structlog.get_logger()``: an event name and named values, never text
built up front. Only a component's ``__main__`` calls ``configure_logging``. Records of
the standard library's ``logging`` (aiohttp, asyncio) come out in the same form.
"""

import asyncio
import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
"""Names of the levels, for settings."""

_BUFFERED_LINES = 256
_BUFFERED_SECONDS = 0.05
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def configure_logging(
    *,
    component: str,
    level: LogLevel = "info",
    json: bool | None = None,
    stream: TextIO | None = None,
) -> None:
    """Route all logs of the process to ``stream`` (standard error unless given).

    ``json`` chooses JSON lines or lines for people; ``None`` means JSON unless the stream
    is a terminal. Colours follow ``NO_COLOR``. Every event carries a UTC timestamp, the
    level and ``component``. Raises ``ValueError`` for an unknown level.
    """
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}; known: {', '.join(_LEVELS)}")
    target = sys.stderr if stream is None else stream
    as_json = not target.isatty() if json is None else json
    stamp = _stamp_with(component)
    shared: list[Processor] = [stamp, *([_render_exception] if as_json else [])]
    colours = target.isatty() and not os.environ.get("NO_COLOR")
    structlog.configure(
        processors=[_render_lines(stamp)] if as_json else [stamp, _console(colours=colours)],
        wrapper_class=_wrapper_class(_LEVELS[level], stamp, as_json=as_json),
        logger_factory=_logger_factory(target, as_json=as_json),
        cache_logger_on_first_use=True,
    )
    _adopt_standard_logging(
        shared,
        renderer=_render_json_text if as_json else _console(colours=colours),
        level=_LEVELS[level],
        target=target,
    )


def _logger_factory(target: TextIO, *, as_json: bool) -> Callable[..., WrappedLogger]:
    if as_json and hasattr(target, "buffer"):
        lines = _LineBuffer(target.buffer)
        return lambda *_names: lines
    if as_json:
        raise ValueError("JSON logs need a stream with a binary buffer")
    return structlog.WriteLoggerFactory(target)


def _wrapper_class(level: int, stamp: Processor, *, as_json: bool) -> type[Any]:
    """Return the class of loggers, with a short way for the one event that every request has.

    The library's own way to a line takes 8 us, a tenth of what the ingress does for a request.
    """
    usual: type[Any] = structlog.make_filtering_bound_logger(level)
    if not as_json or level > logging.INFO:
        return usual

    def info(self: Any, event: str, *args: object, **fields: Any) -> None:  # noqa: ANN401 (as structlog has it)
        if args or "exc_info" in fields:
            usual.info(self, event, *args, **fields)
        else:
            fields["event"] = event
            stamped = stamp(None, "info", {**self._context, **fields} if self._context else fields)
            self._logger.info(_encode(cast("EventDict", stamped)))

    return type("LineLogger", (usual,), {"info": info})


class _LineBuffer:
    """Writes JSON lines: warnings and worse at once, the rest a few at a time.

    A busy ingress logs every decision; a write per line would be its dearest system call.
    Without an event loop, as at start-up, every line is written at once.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        atexit.register(self._flush)

    def debug(self, line: bytes) -> None:
        """Write a line soon."""
        self._lines.append(line)
        if self._timer is not None and len(self._lines) < _BUFFERED_LINES:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush()
            return
        if self._timer is None:
            self._timer = loop.call_later(_BUFFERED_SECONDS, self._flush)
        else:
            self._flush()

    info = msg = debug

    def warning(self, line: bytes) -> None:
        """Write a line, and those that wait, at once."""
        self._lines.append(line)
        self._flush()

    error = critical = exception = fatal = warn = failure = err = warning

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            self._lines.append(b"")
            text = b"\n".join(self._lines)
            self._lines.clear()
            # Whoever read the log is gone, or slow on a pipe that does not block: lines are
            # lost, but a log call must not fail its caller.
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()


def _adopt_standard_logging(
    shared: list[Processor], *, renderer: Processor, level: int, target: TextIO
) -> None:
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *shared,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(capture=True)


def _stamp_with(component: str) -> Processor:
    """Make the one processor that adds what every event carries, in reading order."""
    second, shown_second = -1, ""

    def stamp(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        nonlocal second, shown_second
        whole, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
        if whole != second:
            second, shown_second = whole, datetime.fromtimestamp(whole, UTC).isoformat()[:-6]
        return {
            "timestamp": f"{shown_second}.{milliseconds:03d}Z",
            "level": "error" if method == "exception" else method,
            "component": component,
            "event": event.pop("event", ""),
            **event,
        }

    return stamp


def _render_exception(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if not event.get("exc_info"):
        event.pop("exc_info", None)
        return event
    return structlog.processors.format_exc_info(logger, method, event)


def _render_lines(stamp: Processor) -> Processor:
    """Make one processor of all that lead to a JSON line: each costs a microsecond a request."""

    def render(logger: WrappedLogger, method: str, event: EventDict) -> bytes:
        stamped = cast("EventDict", stamp(logger, method, event))
        if "exc_info" in stamped:
            stamped = _render_exception(logger, method, stamped)
        return _encode(stamped)

    return render


def _render_json_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return _encode(event).decode()


def _encode(event: EventDict) -> bytes:
    try:
        return _ENCODER.encode(event)
    except (TypeError, ValueError, OverflowError) as error:
        # A log call must not fail its caller: keys that are no text, lone surrogates.
        return _ENCODER.encode({"event": ascii(event), "log_error": str(error)})


_ENCODER = msgspec.json.Encoder(enc_hook=repr)


def _console(*, colours: bool) -> Processor:
    return cast(
        "Processor",
        structlog.dev.ConsoleRenderer(
            colors=colours, exception_formatter=structlog.dev.plain_traceback
        ),
    )
