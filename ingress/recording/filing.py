"""Appending records to a file, one JSON object a line; called on the outbox's thread."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from nearkv.ingress.recording.records import RequestRecord

_MODE = 0o640


class RecordFile:
    """A file that is begun anew at a size: FILE becomes FILE.1, FILE.1 FILE.2, and so on."""

    def __init__(
        self,
        path: Path,
        *,
        limit_bytes: int,
        kept: int,
        read: Callable[[RequestRecord], msgspec.Struct],
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._kept = kept
        self._read = read
        self._encoder = msgspec.json.Encoder()

    def check(self) -> None:
        """Raise ``OSError`` where the file cannot be appended to."""
        os.close(self._open())

    def write(self, records: list[RequestRecord]) -> None:
        """Append records; raises ``OSError``."""
        lines = []
        for record in records:
            lines.append(self._encoder.encode(self._read(record)))
            time.sleep(0)  # let the event loop have the interpreter between any two
        data = b"\n".join(lines) + b"\n"
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            if size and size + len(data) > self._limit_bytes:
                os.close(descriptor)
                self._rotate()
                descriptor = self._open()
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _rotate(self) -> None:
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
