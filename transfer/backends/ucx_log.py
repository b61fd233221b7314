"""What NIXL's UCX says it uses. NIXL gives out no endpoint, but UCX can be had to log its choice.

With UCX_PROTO_INFO it writes a table when an endpoint is first used for an operation::

    | nearkv-1f intra-node cfg#1                                       |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | 0..inf | zero-copy   | cma/memory                                |

It goes into a memfd, which costs no disk and ends with the process. Where somebody has set one
of the three variables, theirs count, and the path is not known.
"""

import ctypes
import os
import re
from pathlib import Path

_NAME = "nearkv-ucx-log"
_FILE = "UCX_LOG_FILE"
_WANTED = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "*get*"}
_OURS = re.compile(r"/proc/self/fd/(\d+)")
_LONGEST_BYTES = 1 << 20
"""More than that is let go: only the latest is ever read."""

_NODES = re.compile(r"\|\s*(?P<agent>\S+) (?:intra|inter)-node cfg#")
_READS = re.compile(r"\|\s*remote memory read by ucp_get")
_ROW = re.compile(r"\|\s*\S+\.\.inf\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<transport>[^|]*?)\s*\|")


def arrange_log() -> None:
    """Have UCX log its choices; to be called before it is loaded. May be called again."""
    found = _OURS.fullmatch(os.environ.get(_FILE, ""))
    if found and _descriptor() is None:
        # Inherited from a process where the descriptor meant something.
        for name in (_FILE, *_WANTED):
            os.environ.pop(name, None)
    if any(name in os.environ for name in (_FILE, *_WANTED)):
        return
    os.environ.update(_WANTED)
    os.environ[_FILE] = f"/proc/self/fd/{os.memfd_create(_NAME)}"


def read_log() -> str:
    """Return the latest of what UCX has logged; empty where it is not known."""
    fd = _descriptor()
    if fd is None:
        return ""
    ctypes.CDLL(None).fflush(None)  # UCX's stream keeps what it has until then
    size = os.fstat(fd).st_size
    text = os.pread(fd, _LONGEST_BYTES, max(0, size - _LONGEST_BYTES))
    if size > _LONGEST_BYTES:
        os.ftruncate(fd, 0)
    return text.replace(b"\0", b"").decode(errors="replace")


def reads_of(agent: str, log: str) -> tuple[str, str] | None:
    """Return (transport, how) of an agent's long reads, by UCX's log; pure."""
    found = None
    ours = in_table = False
    for line in log.splitlines():
        if nodes := _NODES.search(line):
            ours, in_table = nodes["agent"] == agent, False
        elif ours and "ucp_" in line:
            in_table = _READS.search(line) is not None
        elif ours and in_table and (row := _ROW.search(line)):
            found = row["transport"], row["how"]
    return found


def _descriptor() -> int | None:
    """Return the descriptor of our log, if it is what UCX writes to."""
    found = _OURS.fullmatch(os.environ.get(_FILE, ""))
    if found is None:
        return None
    try:
        target = Path(f"/proc/self/fd/{found[1]}").readlink()
    except OSError:
        return None
    return int(found[1]) if _NAME in str(target) else None
