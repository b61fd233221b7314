"""Small reads of sysfs: a file that is missing, refused or full of garbage reads as ``None``."""

from pathlib import Path

_MAX_BYTES = 4096
"""A sysfs attribute is a page at most; whatever is longer is none."""
_MAX_DIGITS = 20
_MAX_NAME = 64


def read_text(path: Path) -> str | None:
    """Return a file's text without white space around it, or ``None``."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def read_name(path: Path) -> str | None:
    """Return a short printable text, or ``None``: it goes into answers and labels."""
    text = read_text(path)
    if not text or len(text) > _MAX_NAME or not (text.isascii() and text.isprintable()):
        return None
    return text


def read_count(path: Path) -> int | None:
    """Return a file's whole number from 0 up, or ``None``."""
    text = read_text(path)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        return None
    return int(text)


def list_names(folder: Path) -> list[str] | None:
    """Return the names in a folder in order, or ``None`` where it cannot be listed."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return None


def is_there(path: Path) -> bool:
    """Tell whether a path can be reached; one that is refused counts as not there."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def is_missing(folder: Path) -> bool:
    """Tell whether a folder is not there at all, rather than out of reach."""
    try:
        folder.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
