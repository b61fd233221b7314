"""Which way KV goes between nodes (pure): what agents can do, and what they really did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nearkv.cli.doctor_checks import Verdict

PREFERENCE = ("nixl", "ucx", "tcp")
"""Ways between nodes, best first; the default of the agent's ``transfer.paths``."""
# Device memory goes from GPU to GPU; that is not shared memory's failure.
_WITHIN_NODE = ("shm", "cuda")


class ProbeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent found out about a transport."""

    name: str
    usable: bool = False
    rdma: bool = False
    detail: str = ""


class PairStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How pulls from one node to another went."""

    source: str
    target: str
    path: str
    rdma: bool = False
    detail: str = ""
    pulls: int = 0
    measured: bool = False
    bytes_per_second: float | None = None


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The ``transfer`` section of an agent's status, as far as it is needed."""

    paths: tuple[ProbeStatus, ...] = ()
    pairs: tuple[PairStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node by its agent; ``transfer`` is ``None`` where it is off."""

    name: str
    transfer: TransferStatus | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFinding:
    """One ordered pair of nodes. ``expected`` is empty where there is no path.

    ``used`` is ``None`` when nothing was pulled so far.
    """

    source: str
    target: str
    verdict: Verdict
    expected: str
    why: str
    used: str | None = None
    bytes_per_second: float | None = None
    advice: str = ""


def read_node(document: dict[str, Any], url: str) -> Node:
    """Read an agent's status; raises :class:`msgspec.ValidationError`, naming the field."""
    transfer = msgspec.convert(document.get("transfer"), TransferStatus | None)
    name = document.get("node")
    return Node(name=name if isinstance(name, str) and name else url, transfer=transfer)


def judge_pairs(nodes: Sequence[Node]) -> list[PairFinding]:
    """Return a finding per ordered pair, nodes with themselves included."""
    return [_judge(source, target) for source in nodes for target in nodes]


def _judge(source: Node, target: Node) -> PairFinding:
    expected, why = _expect(source, target)
    pair = _last_used(source.name, target)
    used = None if pair is None else pair.path
    verdict, advice = Verdict.OK, ""
    if used is not None and source is target and used not in _WITHIN_NODE:
        verdict = Verdict.WARN
        advice = "pulls within a node should use shared memory: see the agent's problems and log"
    elif used is not None and source is not target and used != expected:
        verdict = Verdict.WARN
        advice = "not the expected path: see transfer.paths of both agents, and their logs"
    elif not expected:
        verdict = Verdict.WARN
        advice = "see the rows of transports on both nodes"
    return PairFinding(
        source=source.name,
        target=target.name,
        verdict=verdict,
        expected=expected,
        why=why,
        used=used,
        bytes_per_second=pair.bytes_per_second if pair is not None and pair.measured else None,
        advice=advice,
    )


def _expect(source: Node, target: Node) -> tuple[str, str]:
    """Return the path that would be used, and why."""
    off = [node.name for node in (source, target) if node.transfer is None]
    if source.transfer is None or target.transfer is None:
        return "", f"transfer is off at {', '.join(dict.fromkeys(off))}"
    if source is target:
        return "shm", "same node"
    here, there = (
        {probe.name: probe for probe in node.transfer.paths if probe.usable}
        for node in (source, target)
        if node.transfer is not None
    )
    reasons = []
    for name in PREFERENCE:
        if name in here and name in there:
            rdma = here[name].rdma and there[name].rdma
            reasons.append(f"{name} works on both, {'with' if rdma else 'without'} RDMA")
            return name, "; ".join(reasons)
        lacking = [n.name for n, p in ((source, here), (target, there)) if name not in p]
        reasons.append(f"{name} not usable at {', '.join(lacking)}")
    return "", "; ".join(reasons)


def _last_used(source: str, target: Node) -> PairStatus | None:
    """Return what the reader's agent says, as it is the one that pulls."""
    pairs = () if target.transfer is None else target.transfer.pairs
    return next(
        (p for p in pairs if p.source == source and p.target == target.name and p.pulls), None
    )
