"""What UCX really uses, read from what it says about its contexts and endpoints.

ucxx has no call for an endpoint's transports, but libucp prints them: lanes, and a table per
operation that says which lane takes messages of which size. A row looks like this::

    # |         8K..inf | (?) rendezvous zero-copy read from remote | cma/memory |
"""

import ctypes
import re
from pathlib import Path as FilePath

from nearkv.transfer.backends.contract import Path
from nearkv.transfer.backends.native_transport import is_rdma

_LANE = re.compile(r"lane\[\d+\]:\s+\d+:(?P<transport>[\w/.:-]+?)(?:\.\d+)?\s+md\[")
_RESOURCE = re.compile(r"resource\s+\d+\s+:.*--\s+(?P<transport>\S+/\S+)")
_TAG_TABLE = re.compile(r"\|\s*tagged message by ucp_tag_send\* from ")
_LONGEST = re.compile(r"\|\s*\S+\.\.inf\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<transport>[^|]*?)\s*\|")


def path_of(endpoint_info: str) -> Path:
    """Return what long messages of an endpoint go over; pure.

    ``rdma`` is true only where the table says so. Without a table the transport is unknown.
    """
    lanes = ", ".join(sorted(set(_LANE.findall(endpoint_info))))
    used = _longest_messages(endpoint_info)
    if used is None:
        return Path(name="ucx", detail=f"unknown; lanes: {lanes or 'none seen'}")
    how, transport = used
    return Path(
        name="ucx",
        rdma=any(is_rdma(word) for word in transport.split()),
        detail=f"{transport}: {how}; lanes: {lanes}",
    )


def _longest_messages(endpoint_info: str) -> tuple[str, str] | None:
    in_table = False
    for line in endpoint_info.splitlines():
        if "ucp_" in line:
            in_table = _TAG_TABLE.search(line) is not None
        elif in_table and (row := _LONGEST.search(line)):
            return row["how"].removeprefix("(?) "), row["transport"]
    return None


def transports_of(context_info: str) -> tuple[str, ...]:
    """Return a context's transports, such as ``tcp/lo``, from what it says about itself; pure."""
    return tuple(_RESOURCE.findall(context_info))


def endpoint_info(handle: int) -> str:
    """Return what libucp says about an endpoint; empty where it cannot be asked.

    ``handle`` is a ``ucp_ep_h``; ``ucp_ep_print_info`` is part of UCX's stable interface.
    """
    libucp = _loaded_libucp()
    if libucp is None:
        return ""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size))
    if not stream:
        return ""
    libucp.ucp_ep_print_info(ctypes.c_void_p(handle), ctypes.c_void_p(stream))
    libc.fclose(ctypes.c_void_p(stream))
    try:
        return ctypes.string_at(buffer, size.value).decode(errors="replace")
    finally:
        libc.free(buffer)


def _loaded_libucp() -> ctypes.CDLL | None:
    """Return the libucp that is loaded already; loading one by name could find another."""
    for line in FilePath("/proc/self/maps").read_text().splitlines():
        if "/libucp" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None
