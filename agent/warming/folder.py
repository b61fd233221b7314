"""A folder of prompts to load, such as a mounted ConfigMap."""

from pathlib import Path

import msgspec

from nearkv.agent.warming.errors import BadWarmRequestError
from nearkv.agent.warming.requests import check_id

_SUFFIXES = (".txt", ".json")


def read_folder(
    folder: Path, *, max_files: int, max_body_bytes: int
) -> tuple[dict[str, bytes], list[str]]:
    """Return the bodies by prefix id, and what is wrong with other files, in words for people.

    Kubernetes' own entries of a mounted ConfigMap (``..data``) and other hidden files are passed
    over.
    """
    bodies: dict[str, bytes] = {}
    problems: list[str] = []
    try:
        files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        return {}, [f"{folder}: {error.strerror}"]
    for path in files:
        if path.suffix not in _SUFFIXES:
            problems.append(f"{path.name}: expected the suffix .txt or .json")
            continue
        if not path.is_file():
            problems.append(f"{path.name}: is no file")  # reading a pipe would wait for ever
            continue
        if len(bodies) >= max_files:
            problems.append(f"{folder}: only the first {max_files} files are read")
            break
        try:
            bodies[check_id(path.stem)] = _read(path, max_body_bytes)
        except (OSError, UnicodeDecodeError, BadWarmRequestError) as error:
            problems.append(f"{path.name}: {error}")
    return bodies, problems


def _read(path: Path, max_body_bytes: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(max_body_bytes + 1)
    if len(content) > max_body_bytes:
        raise BadWarmRequestError(f"is over the limit of {max_body_bytes} bytes")
    return msgspec.json.encode({"prompt": content.decode()}) if path.suffix == ".txt" else content
