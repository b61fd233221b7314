"""``nearkv doctor upgrade``: two running engines, and what nearkv loses by the new one."""

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearkv.agent.engine_kinds_probing import EngineKindProbe
from nearkv.agent.errors import EngineProbeError
from nearkv.agent.event_sources import EventSource
from nearkv.agent.probing import open_engine_session
from nearkv.certificates import ClientFiles
from nearkv.cli.doctor_upgrade_asking import EngineAsker
from nearkv.cli.doctor_upgrade_events import compare_events, compare_hits
from nearkv.cli.doctor_upgrade_identity import (
    compare_endpoints,
    compare_identity,
    compare_tokens,
)
from nearkv.cli.doctor_upgrade_metrics import block_size_of, compare_metrics
from nearkv.cli.doctor_upgrade_model import AgentFacts, Card, EngineFacts, Finding, Severity
from nearkv.cli.doctor_upgrade_prompting import EngineUnderTest, Prompting, send_prompts
from nearkv.cli.doctor_upgrade_samples import DEFAULT_BLOCK_TOKENS
from nearkv.cli.doctor_upgrade_transfer import compare_agents, compare_transfer
from nearkv.cli.fetching import Endpoint, fetch_all
from nearkv.cli.trusting import load_trust
from nearkv.errors import NearkvError

_BROKEN_STATUS = 1
_ATTEMPTS = 2
_NONCE_BYTES = 12
# As in status: long lines are left to the terminal.
_TABLE_WIDTH = 10_000
_STYLES = {"breaks": "red", "degrades": "yellow", "unknown": "yellow", "same": "dim"}
_COLUMNS = ("CHECK", "VERDICT", "OLD", "NEW", "WHAT HAPPENS", "WHAT TO DO")


class UpgradeQuestionError(NearkvError):
    """The question makes no sense: a URL that is none, a model that the old engine lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeQuestion:
    """What is asked: as it came from the command line.

    ``old_events`` and ``new_events`` are ``LIVE[,REPLAY]``, for engines that do not tell where
    their KV events are, or tell it to another network than this one. ``token`` and ``files`` are
    for agents, ``api_key`` for engines.
    """

    old_url: str
    new_url: str
    model: str | None
    send_prompt: bool
    agents: Sequence[str] = ()
    old_events: str = ""
    new_events: str = ""
    event_seconds: float = 5.0
    timeout_seconds: float = 30.0
    api_key: str | None = None
    token: str | None = None
    files: ClientFiles = field(default_factory=ClientFiles)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both engines, and all findings."""

    old: EngineFacts
    new: EngineFacts
    findings: list[Finding]

    @property
    def verdict(self) -> Severity:
        """The worst of all findings."""
        order = list(Severity)
        found = (finding.severity for finding in self.findings)
        return min(found, key=order.index, default=Severity.SAME)


def run_upgrade(question: UpgradeQuestion, *, output: str) -> int:
    """Compare the engines and print it; return the exit status.

    It is 1 when something breaks or an engine does not answer. ``output`` is ``table``, ``json``
    or ``yaml``. Raises :class:`UpgradeQuestionError`, and ``TrustError`` when the files for TLS
    cannot be used.
    """
    for url in (question.old_url, question.new_url):
        if urlsplit(url).scheme not in ("http", "https"):
            raise UpgradeQuestionError(f"{url}: is not an HTTP URL; write http://host:port")
    try:
        comparison = asyncio.run(examine(question))
    except EngineProbeError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nearkv: {line}\n")
        return _BROKEN_STATUS
    if output == "table":
        _print_table(comparison)
    else:
        sys.stdout.write(_as_document(comparison, output))
    return _BROKEN_STATUS if comparison.verdict is Severity.BREAKS else 0


def compare_engines(
    old: EngineFacts, new: EngineFacts, agents: Sequence[AgentFacts] = ()
) -> list[Finding]:
    """Return everything that was compared, in the order of the parts (pure)."""
    return [
        *compare_identity(old, new),
        *compare_endpoints(old, new),
        *compare_tokens(old, new),
        *compare_events(old, new),
        *compare_hits(old, new),
        *compare_metrics(old, new),
        *compare_transfer(old, new),
        *compare_agents(old, new, agents),
    ]


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine that answered."""

    url: str
    asker: EngineAsker
    version: str | None
    cards: tuple[Card, ...]
    sources: Mapping[int, EventSource] | None


async def examine(question: UpgradeQuestion) -> Comparison:
    """Ask both engines; raises as :func:`run_upgrade` does, and ``EngineProbeError``."""
    async with open_engine_session() as session:
        old, new = await _identify_both(question, session)
        model = _choose_model(question, old)
        names = [model, _name_at(new, model)]
        before, after = await asyncio.gather(
            *(_look_at(engine, name) for engine, name in zip((old, new), names, strict=True))
        )
        if question.send_prompt:
            engines = [
                EngineUnderTest(engine.asker, name, engine.sources)
                for engine, name in zip((old, new), names, strict=True)
            ]
            prompts = await send_prompts(engines, _prompting(question, before, after))
            pages = await asyncio.gather(_metrics(old.asker), _metrics(new.asker))
            before = replace(before, prompt=prompts[0], metrics=pages[0])
            after = replace(after, prompt=prompts[1], metrics=pages[1])
    return Comparison(before, after, compare_engines(before, after, await _ask_agents(question)))


async def _identify_both(
    question: UpgradeQuestion, session: aiohttp.ClientSession
) -> tuple[_Engine, _Engine]:
    """Return who answers; raises ``EngineProbeError``, with a line for each that does not."""
    # With exceptions as results: nobody may still be asking when the session is closed.
    old, new = await asyncio.gather(
        _identify(question, question.old_url, question.old_events, session),
        _identify(question, question.new_url, question.new_events, session),
        return_exceptions=True,
    )
    if isinstance(old, EngineProbeError) and isinstance(new, EngineProbeError):
        raise EngineProbeError(f"{old}\n{new}")
    for result in (old, new):
        if isinstance(result, BaseException):
            raise result
    return cast("_Engine", old), cast("_Engine", new)


async def _identify(
    question: UpgradeQuestion, url: str, events: str, session: aiohttp.ClientSession
) -> _Engine:
    """Return who answers; raises ``EngineProbeError``, which names the URL."""
    probe = EngineKindProbe(
        url, session, timeout_seconds=question.timeout_seconds, bearer_token=question.api_key
    )
    asker = EngineAsker(
        url, session, timeout_seconds=question.timeout_seconds, api_key=question.api_key
    )
    try:
        cards = await probe.models()
        version = await probe.version()
        sources = {0: _source(events)} if events else await probe.event_sources()
    except EngineProbeError as error:
        if url in str(error):
            raise
        raise EngineProbeError(f"{url}: {error}") from error
    told = tuple(Card(card.id, card.parent, card.max_model_len) for card in cards)
    return _Engine(url, asker, version, told, sources)


def _source(events: str) -> EventSource:
    live, _, replay = events.partition(",")
    return EventSource(live.strip(), replay.strip() or None)


def _choose_model(question: UpgradeQuestion, old: _Engine) -> str:
    names = [card.id for card in old.cards]
    if question.model is not None and question.model not in names:
        served = ", ".join(names) or "none"
        raise UpgradeQuestionError(f"{old.url} does not serve {question.model}, but: {served}")
    if not names:
        raise UpgradeQuestionError(f"{old.url} serves no model")
    bases = [card.id for card in old.cards if card.parent is None]
    return question.model or (bases or names)[0]


def _name_at(engine: _Engine, model: str) -> str:
    """Return the model's name at an engine; one of its own where it has another name there."""
    names = [card.id for card in engine.cards]
    return model if model in names or not names else names[0]


async def _look_at(engine: _Engine, model: str) -> EngineFacts:
    asker = engine.asker
    return EngineFacts(
        url=engine.url,
        version=engine.version,
        cards=engine.cards,
        model=model,
        metrics=await _metrics(asker),
        sources=engine.sources,
        endpoints=await asker.endpoints(model),
        tokens=await asker.tokens(model),
        rendered=await asker.rendered(model),
    )


async def _metrics(asker: EngineAsker) -> str:
    reply = await asker.ask("/metrics")
    return reply.body.decode("utf-8", "replace") if reply.is_ok else ""


def _prompting(question: UpgradeQuestion, *found: EngineFacts) -> Prompting:
    sizes = [block_size_of(facts.metrics) or DEFAULT_BLOCK_TOKENS for facts in found]
    nonces = [secrets.token_hex(_NONCE_BYTES) for _ in range(_ATTEMPTS)]
    return Prompting(block_tokens=max(sizes), seconds=question.event_seconds, nonces=nonces)


async def _ask_agents(question: UpgradeQuestion) -> list[AgentFacts]:
    if not question.agents:
        return []
    answers = await fetch_all(
        [Endpoint("agent", url) for url in question.agents],
        token=question.token,
        timeout_seconds=question.timeout_seconds,
        certificates=load_trust(question.files),
    )
    return [AgentFacts(each.endpoint.url, each.document, each.error) for each in answers]


def _as_document(comparison: Comparison, output: str) -> str:
    document: dict[str, Any] = {
        "verdict": comparison.verdict.value,
        **{
            name: {"url": facts.url, "version": facts.version, "model": facts.model}
            for name, facts in (("old", comparison.old), ("new", comparison.new))
        },
        "findings": [asdict(finding) for finding in comparison.findings],
    }
    plain = msgspec.to_builtins(document)
    if output == "yaml":
        return msgspec.yaml.encode(plain).decode()
    return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"


def _print_table(comparison: Comparison) -> None:
    console = Console(width=_TABLE_WIDTH, highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    order = list(Severity)
    for row in sorted(comparison.findings, key=lambda each: order.index(each.severity)):
        new = "=" if row.old == row.new else row.new
        cells = (row.check, row.severity.value, row.old, new, row.effect, row.advice)
        # Text, not str: what an engine says may look like rich markup.
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in cells))
    console.print(table)
    counts = [
        f"{count} {severity.value}"
        for severity in Severity
        if (count := sum(row.severity is severity for row in comparison.findings))
    ]
    console.print(f"\n{', '.join(counts)}")
