"""Reading the end of a log, for messages about a process that failed."""

from pathlib import Path

TAIL_BYTES = 16_384


def log_tail(path: Path, *, lines: int = 15) -> str:
    """Return the last lines of a log file; the empty string if there is no such file."""
    try:
        with path.open("rb") as log:
            size_bytes = log.seek(0, 2)
            log.seek(max(0, size_bytes - TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
