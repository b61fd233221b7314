"""``nearkv doctor transfer``: can this host, and can these nodes, move KV, and how."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearkv.certificates import ClientCertificates, ClientFiles
from nearkv.cli.doctor_checks import (
    Finding,
    Verdict,
    check_affinity,
    check_agent_socket,
    check_copying,
    check_memlock,
    check_memory,
    check_namespaces,
    check_rdma,
)
from nearkv.cli.doctor_pairs import PairFinding, judge_pairs, read_node
from nearkv.cli.doctor_probes import probe_all
from nearkv.cli.doctor_store import check_store, judge_stores
from nearkv.cli.fetching import Answer, fetch_all
from nearkv.cli.status import list_endpoints
from nearkv.cli.trusting import load_trust

_FAILED_STATUS = 1
# As in status: long lines are left to the terminal.
_TABLE_WIDTH = 10_000
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "info": "dim"}
_CHECK_COLUMNS = ("CHECK", "VERDICT", "FINDING", "WHAT TO DO")
_PAIR_COLUMNS = ("SOURCE", "TARGET", "VERDICT", "EXPECTED", "USED", "RATE", "WHY", "WHAT TO DO")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorQuestion:
    """What is asked: as it came from the command line. ``root`` holds ``sys`` and ``proc``.

    ``config`` is the agent's settings file, which may name a shared store; ``files`` are for
    agents that serve over TLS.
    """

    agents: Sequence[str]
    token: str | None
    timeout_seconds: float
    socket_dir: Path
    require_rdma: bool
    config: Path | None = None
    files: ClientFiles = field(default_factory=ClientFiles)
    root: Path = Path("/")


def run_doctor(question: DoctorQuestion, *, as_json: bool) -> int:
    """Check everything and print it; return the exit status, 1 when something failed.

    Raises ``TrustError`` when the files for TLS cannot be used.
    """
    checks, pairs = asyncio.run(_examine(question, load_trust(question.files)))
    if as_json:
        document = {
            "checks": [_as_json(row) for row in checks],
            "pairs": [_as_json(row) for row in pairs],
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    else:
        _print_tables(checks, pairs)
    verdicts = [*(row.verdict for row in checks), *(row.verdict for row in pairs)]
    return _FAILED_STATUS if Verdict.FAIL in verdicts else 0


def check_host(question: DoctorQuestion) -> list[Finding]:
    """Return the rows of this host, but for transports."""
    rdma = question.require_rdma
    return [
        *check_memory(question.root),
        check_copying(),
        check_memlock(require_rdma=rdma),
        check_rdma(question.root, require_rdma=rdma),
        *check_affinity(question.root),
        check_agent_socket(question.socket_dir),
        check_namespaces(question.root),
    ]


async def _examine(
    question: DoctorQuestion, trust: ClientCertificates
) -> tuple[list[Finding], list[PairFinding]]:
    endpoints = list_endpoints(
        question.agents, (), {"NEARKV_AGENTS": os.environ.get("NEARKV_AGENTS", "")}
    )
    transports, answers = await asyncio.gather(
        probe_all(),
        fetch_all(
            endpoints,
            token=question.token,
            timeout_seconds=question.timeout_seconds,
            certificates=trust,
        ),
    )
    troubles, pairs = judge_answers(answers)
    stores = [*check_store(question.config, os.environ), *judge_stores(answers)]
    return [*check_host(question), *transports, *stores, *troubles], pairs


def judge_answers(answers: Sequence[Answer]) -> tuple[list[Finding], list[PairFinding]]:
    """Return what is wrong with agents' answers, and the pairs of those that can be read."""
    nodes, troubles = [], []
    for answer in answers:
        error = answer.error
        if answer.document is not None:
            try:
                nodes.append(read_node(answer.document, answer.endpoint.url))
            except msgspec.ValidationError as wrong:
                error = f"its transfer section cannot be read: {wrong}"
        if error:
            name = f"agent {answer.endpoint.url}"
            troubles.append(Finding(check=name, verdict=Verdict.FAIL, finding=error))
    return troubles, judge_pairs(nodes)


def _as_json(row: Finding | PairFinding) -> dict[str, Any]:
    return {
        key: value.value if isinstance(value, Enum) else value for key, value in asdict(row).items()
    }


def _print_tables(checks: Sequence[Finding], pairs: Sequence[PairFinding]) -> None:
    console = Console(width=_TABLE_WIDTH, highlight=False, markup=False, emoji=False)
    rows = [(row.check, row.verdict.value, row.finding, row.advice) for row in checks]
    console.print(_table(_CHECK_COLUMNS, rows))
    if pairs:
        console.print()
        console.print(_table(_PAIR_COLUMNS, [_pair_cells(pair) for pair in pairs]))


def _pair_cells(pair: PairFinding) -> tuple[str, ...]:
    rate = pair.bytes_per_second
    return (
        *(pair.source, pair.target, pair.verdict.value, pair.expected or "no path"),
        *(pair.used or "-", "-" if rate is None else f"{rate / 1e9:.2f} GB/s"),
        *(pair.why, pair.advice),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        # Text, not str: what a library says may look like rich markup.
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    return table
