"""Error counters as growth since the agent first saw them (pure).

The hardware's counters go on from before the agent's start, are set back by tools, and begin
anew with a driver. So what stands there first is the start, and a fall is a new beginning.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

RDMA_COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "counters/symbol_error": "symbol_error",
        "counters/link_downed": "link_downed",
        "counters/link_error_recovery": "link_recovery",
        "counters/local_link_integrity_errors": "link_integrity",
        "counters/port_rcv_errors": "receive_error",
        "counters/port_xmit_discards": "transmit_discard",
        "hw_counters/out_of_sequence": "out_of_sequence",
        "hw_counters/packet_seq_err": "sequence_nak",
        "hw_counters/seq_err_naks_rcvd": "sequence_nak",
        "hw_counters/out_of_buffer": "out_of_buffer",
        "hw_counters/local_ack_timeout_err": "retry",
        "hw_counters/rnr_nak_retry_err": "retry",
        "hw_counters/roce_adp_retrans": "retry",
        "hw_counters/to_retransmits": "retry",
        "hw_counters/retrans_pkts": "retry",
        "hw_counters/req_transport_retries_exceeded": "retry_exceeded",
        "hw_counters/max_retry_exceeded": "retry_exceeded",
    }
)
"""Files below a port, and the error each counts; drivers have some of them each."""

NET_COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "carrier_down_count": "link_downed",
        "statistics/rx_errors": "receive_error",
        "statistics/tx_errors": "transmit_error",
        "statistics/rx_crc_errors": "crc_error",
        "statistics/rx_dropped": "receive_drop",
        "statistics/tx_dropped": "transmit_drop",
    }
)
"""Files below a network device, and the error each counts."""

FAULTS = frozenset(
    {"symbol_error", "link_downed", "link_recovery", "link_integrity", "crc_error"}
    | {"retry_exceeded"}
)
"""Errors of a sound link are none of these; the others come with congestion as well."""


_MOST_RECENT = 1024


def _recent() -> deque[tuple[float, str, int]]:
    return deque(maxlen=_MOST_RECENT)


@dataclass(slots=True)
class _Counted:
    identity: str
    last: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    recent: deque[tuple[float, str, int]] = field(default_factory=_recent)


class ErrorHistory:
    """Growth of each link's errors, since it was first seen and within a recent window."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._links: dict[str, _Counted] = {}

    def observe(
        self,
        link: str,
        *,
        identity: str,
        counters: Mapping[str, int],
        kinds: Mapping[str, str],
        now: float,
    ) -> None:
        """Take the counters of a link by file name; another ``identity`` is another device.

        ``kinds`` says which error each file counts.
        """
        known = self._links.get(link)
        if known is None or known.identity != identity:
            known = self._links[link] = _Counted(identity)
        for name, count in counters.items():
            kind = kinds[name]
            before = known.last.get(name)
            known.last[name] = count
            known.totals.setdefault(kind, 0)
            if before is None or count == before:
                continue
            grown = count - before if count > before else count
            known.totals[kind] += grown
            if grown:
                known.recent.append((now, kind, grown))
        while known.recent and known.recent[0][0] < now - self._window_seconds:
            known.recent.popleft()

    def keep_only(self, links: Iterable[str]) -> None:
        """Forget links that are gone."""
        kept = set(links)
        self._links = {link: known for link, known in self._links.items() if link in kept}

    def totals(self, link: str) -> Mapping[str, int]:
        """Return a link's errors by kind, those that it counts."""
        known = self._links.get(link)
        return {} if known is None else known.totals

    def recent(self, link: str) -> Mapping[str, int]:
        """Return what grew within the window, as of the last reading."""
        grown: dict[str, int] = {}
        known = self._links.get(link)
        for _, kind, count in () if known is None else known.recent:
            grown[kind] = grown.get(kind, 0) + count
        return grown
