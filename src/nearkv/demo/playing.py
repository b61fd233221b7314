"""Playing the scenario against an ingress and collecting what the engines counted."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from nearkv.demo.chat_client import Reply, ask
from nearkv.demo.engine_counters import PromptTokens, read_prompt_tokens
from nearkv.demo.errors import ScenarioError
from nearkv.demo.report import PolicyReport, TopicReport, TurnReport
from nearkv.demo.scenario import Conversation, Topic, turn_numbers

COUNTERS_DEADLINE_SECONDS = 5.0
COUNTERS_POLL_SECONDS = 0.05


class Audience(Protocol):
    """Is told of each turn when it begins and when it is over."""

    def asking(self, document: str, turn: int) -> None:
        """Take note that a question is about to be sent."""

    def answered(self, document: str, turn: TurnReport) -> None:
        """Take note that its answer has come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays topics through one ingress; the engines' URLs are for their counters only."""

    session: aiohttp.ClientSession
    ingress_url: str
    engine_urls: tuple[str, ...]
    model_name: str
    policy: str
    audience: Audience

    async def play(self, topics: Sequence[Topic]) -> PolicyReport:
        """Play all topics, one after another."""
        reports = [await self._play_topic(topic) for topic in topics]
        return PolicyReport(policy=self.policy, topics=tuple(reports))

    async def _play_topic(self, topic: Topic) -> TopicReport:
        before = await self._prompt_tokens()
        conversation = Conversation(topic, edition=f"{self.policy} copy")
        turns: list[TurnReport] = []
        for turn in turn_numbers(topic):
            self.audience.asking(topic.name, turn)
            reply = await ask(
                self.session,
                self.ingress_url,
                model=self.model_name,
                messages=conversation.ask(turn),
            )
            conversation.hear(reply.text)
            turns.append(turn_report(turn, reply))
            self.audience.answered(topic.name, turns[-1])
        expected_tokens = sum(turn.prompt_tokens for turn in turns)
        counted = await self._counted_since(before, expected_tokens)
        return TopicReport(document=topic.name, turns=tuple(turns), counted=counted)

    async def _counted_since(self, before: PromptTokens, expected_tokens: int) -> PromptTokens:
        """Wait until the engines have counted all prompts, as they may do after answering.

        Raises ``ScenarioError`` when they do not within the deadline.
        """
        end = time.monotonic() + COUNTERS_DEADLINE_SECONDS
        while (counted := await self._prompt_tokens() - before).total < expected_tokens:
            if time.monotonic() > end:
                raise ScenarioError(
                    f"the engines counted {counted.total} of {expected_tokens} prompt tokens"
                )
            await asyncio.sleep(COUNTERS_POLL_SECONDS)
        return counted

    async def _prompt_tokens(self) -> PromptTokens:
        """Sum the counters of all engines."""
        counts = [await read_prompt_tokens(self.session, url) for url in self.engine_urls]
        return sum(counts, PromptTokens())


def turn_report(turn: int, reply: Reply) -> TurnReport:
    """Keep of a reply what the report shows."""
    return TurnReport(
        turn=turn,
        engine=reply.engine,
        reason=reply.reason,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        predicted_cached_tokens=reply.predicted_cached_tokens,
        ttft_seconds=reply.ttft_seconds,
    )
