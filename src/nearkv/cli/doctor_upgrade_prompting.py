"""One prompt for two engines, and what it leads to: events, cached tokens, transfer parameters."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearkv.agent.event_sources import EventSource
from nearkv.cli.doctor_upgrade_asking import EngineAsker
from nearkv.cli.doctor_upgrade_model import PromptFacts, Replay, Reply
from nearkv.cli.doctor_upgrade_samples import completion_body, make_prompt
from nearkv.cli.doctor_upgrade_traits import PromptWatch, watch_all

if TYPE_CHECKING:
    from nearkv.cli.doctor_upgrade_listening import EventListener

_COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """How to send prompts; ``seconds`` bounds each wait for events, and for a connection.

    There is one attempt for each of ``nonces``: a subscription may take effect too late for the
    first one.
    """

    block_tokens: int
    seconds: float
    nonces: Sequence[str]


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """An engine to send prompts to; ``sources`` is ``None`` where nobody told them."""

    asker: EngineAsker
    model: str
    sources: Mapping[int, EventSource] | None


@dataclass(slots=True)
class _Ear:
    """What listens to an engine, or why nothing does."""

    listener: "EventListener | None"
    source: EventSource | None = None
    trouble: str = ""


async def send_prompts(engines: Sequence[EngineUnderTest], how: Prompting) -> list[PromptFacts]:
    """Send the same prompt to all engines at the same time, and again where events are missing."""
    async with AsyncExitStack() as stack:
        ears = [await _listen(engine, stack, how.seconds) for engine in engines]
        facts: list[PromptFacts] = []
        for nonce in how.nonces:
            text = make_prompt(nonce, how.block_tokens)
            facts = list(
                await asyncio.gather(
                    *(
                        _send(engine, ear, text, how.seconds)
                        for engine, ear in zip(engines, ears, strict=True)
                    )
                )
            )
            if all(_is_done(fact, ear) for fact, ear in zip(facts, ears, strict=True)):
                break
        return facts


async def _listen(engine: EngineUnderTest, stack: AsyncExitStack, seconds: float) -> _Ear:
    """Subscribe to the events of an engine's first rank."""
    if engine.sources is None:
        return _Ear(None, trouble="the engine does not tell where they are")
    if not engine.sources:
        return _Ear(None, trouble="switched off")
    try:
        # pyzmq comes with the agent, not with the bare command line.
        import zmq.asyncio  # noqa: PLC0415 (see above)

        from nearkv.cli.doctor_upgrade_listening import (  # noqa: PLC0415 (see above)
            EventListener,
            ListeningError,
        )
    except ImportError:
        return _Ear(None, trouble="pyzmq is not installed here: pip install 'nearkv[agent]'")
    source = engine.sources[min(engine.sources)]
    context = zmq.asyncio.Context()
    # Not by its own exit, which would wait for sockets that a cancelled wait left open.
    stack.callback(context.destroy, linger=0)
    listener = EventListener(source, context=context, seconds=seconds)
    try:
        return _Ear(await stack.enter_async_context(listener), source)
    except ListeningError as error:
        return _Ear(None, source, str(error))


async def _send(engine: EngineUnderTest, ear: _Ear, text: str, seconds: float) -> PromptFacts:
    sources = engine.sources or {}
    # Of several ranks, only the one that is listened to may take the prompt.
    headers = {"X-data-parallel-rank": str(min(sources))} if len(sources) > 1 else {}
    tokens = await engine.asker.tokenize(engine.model, text)

    async def complete(*, hand_over: bool = False) -> Reply:
        body = completion_body(engine.model, text, hand_over=hand_over)
        return await engine.asker.ask(_COMPLETIONS, body, headers=headers)

    first = await complete()
    if not first.is_ok:
        return PromptFacts(
            token_ids=tokens, first=first, again=first, handed_over=first, trouble=ear.trouble
        )
    if ear.listener is not None:
        await ear.listener.collect(PromptWatch(tokens).add, seconds=seconds)
    return PromptFacts(
        token_ids=tokens,
        first=first,
        again=await complete(),
        handed_over=await complete(hand_over=True),
        messages=() if ear.listener is None else tuple(ear.listener.messages),
        trouble=ear.trouble,
        replay=await _replay(ear, seconds),
    )


async def _replay(ear: _Ear, seconds: float) -> Replay | None:
    """Ask for the last message again: an answer costs the engine next to nothing."""
    if ear.listener is None or ear.source is None or ear.source.replay_endpoint is None:
        return None
    heard = [message.seq for message in ear.listener.messages if message.seq is not None]
    return (
        await ear.listener.ask_replay(
            ear.source.replay_endpoint, start=max(heard, default=0), seconds=seconds
        )
        if heard
        else None
    )


def _is_done(facts: PromptFacts, ear: _Ear) -> bool:
    if ear.listener is None or not facts.first.is_ok:
        return True
    return watch_all(facts.messages, facts.token_ids).is_complete
