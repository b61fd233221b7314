"""``nearkv report``: where the time goes, and whether to separate prefill from decode."""

import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearkv.break_even import Link
from nearkv.certificates import ClientCertificates, ClientFiles
from nearkv.cli.fetching import Endpoint, fetch_all
from nearkv.cli.plan import PlanError, parse_link
from nearkv.cli.status import list_endpoints
from nearkv.cli.status_model import AgentStatus
from nearkv.cli.trusting import load_trust
from nearkv.report.answering import Answer, Setting, answer_all
from nearkv.report.errors import ReportError
from nearkv.report.evidence import Evidence, gather
from nearkv.report.querying import Window, query_all
from nearkv.report.rendering import as_markdown, words_of
from nearkv.report.scraping import Asking, Target, scrape_all

_UNHEALTHY_STATUS = 1
# As in status: long lines are left to the terminal.
_TABLE_WIDTH = 10_000
_WINDOW = re.compile(r"(\d{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportQuestion:
    """What is asked: as it came from the command line."""

    ingresses: Sequence[str] = ()
    agents: Sequence[str] = ()
    engines: Sequence[str] = ()
    prometheus: str | None = None
    window: str = "1h"
    match: str = ""
    interval_seconds: float = 0.0
    link: str = "100g-rdma"
    kv_bytes_per_token: float | None = None
    token: str | None = None
    timeout_seconds: float = 5.0
    files: ClientFiles = field(default_factory=ClientFiles)


class _Document(msgspec.Struct, frozen=True):
    """A report as JSON."""

    basis: str
    answers: list[Answer]
    problems: list[str]


def run_report(question: ReportQuestion, *, output: str) -> int:
    """Print the report; return 1 where some endpoint gave nothing.

    ``output`` is ``table``, ``json`` or ``markdown``. Raises :class:`NearkvError` for what
    cannot be asked.
    """
    setting = Setting(_link(question.link), question.kv_bytes_per_token)
    evidence, basis, problems = asyncio.run(_find_out(question))
    answers = answer_all(evidence, setting)
    if output == "json":
        document = _Document(basis, answers, problems)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    elif output == "markdown":
        sys.stdout.write(as_markdown(answers, basis))
    else:
        _print_table(answers, basis)
    for problem in problems:
        sys.stderr.write(f"nearkv: {problem}\n")
    return _UNHEALTHY_STATUS if problems else 0


def parse_window(text: str) -> float:
    """Return a window in seconds, such as 30m or 1h; raises :class:`ReportError`."""
    found = _WINDOW.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ReportError(f"--window: expected such as 30m, 1h or 2d, got {text!r}")
    return float(int(found[1]) * _UNIT_SECONDS[found[2]])


def _link(text: str) -> Link:
    try:
        return parse_link(text)
    except PlanError as error:
        raise ReportError(str(error)) from error


async def _find_out(question: ReportQuestion) -> tuple[Evidence, str, list[str]]:
    """Return the evidence, what it stands on, and what could not be read."""
    trust = load_trust(question.files)
    asking = Asking(question.timeout_seconds, time.time, question.token, trust)
    if question.prometheus is not None:
        window = Window(parse_window(question.window), question.match)
        evidence = await query_all(question.prometheus, window, asking)
        return evidence, f"The last {question.window} at {question.prometheus}", []
    targets, problems = await _targets(question, trust)
    gathered = await scrape_all(targets, asking, interval_seconds=question.interval_seconds)
    problems += [f"{url}: {why}" for url, why in sorted(gathered.failures.items())]
    where = ", ".join(target.metrics_url for target in targets)
    if question.interval_seconds:
        basis = f"{question.interval_seconds:g} s of {len(gathered.changes)} endpoints"
    else:
        basis = f"Everything since the start of {len(gathered.changes)} endpoints"
    return gather(gathered.changes, where=where), basis, problems


async def _targets(
    question: ReportQuestion, trust: ClientCertificates
) -> tuple[list[Target], list[str]]:
    """Return all endpoints to scrape: those named, and the engines that the agents know."""
    endpoints = list_endpoints(question.agents, question.ingresses, _environment(question))
    if not endpoints and not question.engines:
        raise ReportError(
            "no endpoint to ask; give --ingress, --agent or --engine URL, or --prometheus URL, or "
            "set NEARKV_AGENTS or NEARKV_INGRESS"
        )
    engines = list(question.engines)
    problems: list[str] = []
    if not engines:
        engines, problems = await _engines_of(
            [each for each in endpoints if each.component == "agent"], question, trust
        )
    targets = [Target(each.url, secret=each.component == "agent") for each in endpoints]
    known = {target.url for target in targets}
    targets += [Target(url) for url in dict.fromkeys(engines) if url not in known]
    return targets, problems


def _environment(question: ReportQuestion) -> dict[str, str]:
    """Return the environment, unless engines alone were named."""
    return {} if question.engines else dict(os.environ)


async def _engines_of(
    agents: Sequence[Endpoint], question: ReportQuestion, trust: ClientCertificates
) -> tuple[list[str], list[str]]:
    """Return the URLs of agents' engines; their histograms say what agents do not pass on."""
    answers = await fetch_all(
        agents,
        token=question.token,
        timeout_seconds=question.timeout_seconds,
        certificates=trust,
    )
    urls = [
        engine.url
        for answer in answers
        if isinstance(answer.status, AgentStatus)
        for engine in answer.status.engines
        if engine.url
    ]
    problems = [f"{a.endpoint.url}: {a.error}" for a in answers if a.status is None]
    return urls, problems


def _print_table(answers: Sequence[Answer], basis: str) -> None:
    table = Table("QUESTION", "ANSWER", box=None, pad_edge=False)
    for each in answers:
        # Text, not str: what an endpoint says may look like rich markup.
        style = "dim" if each.unknown else ""
        table.add_row(Text(each.question), Text(words_of(each), style=style))
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    console.print(table)
    console.print(Text(f"\n{basis}."))
