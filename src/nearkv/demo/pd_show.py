"""The P/D show: prefill on one engine, decode on another, the KV moved by the agents."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from nearkv.demo.chat_client import Reply, ask
from nearkv.demo.engine_counters import PromptTokens, read_prompt_tokens
from nearkv.demo.engines import BLOCK_SIZE_TOKENS
from nearkv.demo.errors import ScenarioError
from nearkv.demo.pd_report import PdReport, PdTurn, pd_report_json, pd_shortcomings
from nearkv.demo.pd_stage import PdStage, set_pd_stage
from nearkv.demo.rendering import Screen, curl_line, pd_turn_heading, pd_turn_line
from nearkv.demo.scenario import Conversation, topics, turn_numbers
from nearkv.demo.services import ingress
from nearkv.demo.showing import Outcome, watch_processes
from nearkv.demo.stage import casualties
from nearkv.demo.transfers import Transfers, read_transfers, wait_for_engines
from nearkv.demo.workspace import Workspace

COUNTERS_DEADLINE_SECONDS = 5.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PdShowOptions:
    """What to show; ``port`` is the ingress'."""

    model_dir: Path
    rounds: int
    port: int | None
    keep_serving: bool


class PdShow:
    """One run of the P/D demonstration."""

    def __init__(self, options: PdShowOptions, workspace: Workspace, screen: Screen) -> None:
        self._options = options
        self._workspace = workspace
        self._screen = screen

    async def run(self) -> Outcome:
        """Play and report; with ``keep_serving``, go on until cancelled.

        Raises ``DemoError`` when something cannot be started or a request fails.
        """
        options, screen = self._options, self._screen
        async with AsyncExitStack() as stack:
            stage = await stack.enter_async_context(
                set_pd_stage(options.model_dir, self._workspace, screen.progress)
            )
            entry = await stack.enter_async_context(
                ingress(
                    *(agent.url for agent in stage.agents),
                    pd_mode="always",
                    workspace=self._workspace,
                    progress=screen.progress,
                    port=options.port,
                )
            )
            session = await stack.enter_async_context(aiohttp.ClientSession())
            processes = (*stage.processes, entry.process)
            try:
                await wait_for_engines(session, [agent.url for agent in stage.agents])
                turns = await self._play(session, stage, entry.url)
            except ScenarioError as error:
                raise ScenarioError("\n".join([str(error), *casualties(processes)])) from error
            outcome = self._report(stage, turns)
            if options.keep_serving:
                screen.say(f"\nserving; try\n  {curl_line(entry.url, stage.decode.model_name)}")
                screen.say("Ctrl-C stops everything")
                await watch_processes(processes)
            return outcome

    async def _play(
        self, session: aiohttp.ClientSession, stage: PdStage, url: str
    ) -> tuple[PdTurn, ...]:
        """Ask about one document, turn after turn, and see what each turn moved."""
        topic, *_ = topics(self._options.rounds)
        conversation = Conversation(topic, edition="P/D copy")
        self._screen.say(f"\n{topic.name}\n{pd_turn_heading()}")
        turns: list[PdTurn] = []
        for number in turn_numbers(topic):
            counted = await read_prompt_tokens(session, stage.decode.url)
            moved = await read_transfers(session, stage.agents[1].url)
            self._screen.asking(topic.name, number)
            reply = await ask(
                session, url, model=stage.decode.model_name, messages=conversation.ask(number)
            )
            conversation.hear(reply.text)
            counted = await _counted_since(session, stage.decode.url, counted, reply.prompt_tokens)
            moved = await read_transfers(session, stage.agents[1].url) - moved
            turns.append(_turn(number, reply, counted, moved))
            self._screen.say(pd_turn_line(turns[-1]))
        return tuple(turns)

    def _report(self, stage: PdStage, turns: tuple[PdTurn, ...]) -> Outcome:
        """Show the verdict and write the report file."""
        report = PdReport(model=stage.decode.model_name, block_size=BLOCK_SIZE_TOKENS, turns=turns)
        reasons = pd_shortcomings(report)
        if not reasons:
            self._screen.say(
                f"\n{stage.decode.name} computed next to nothing: "
                f"{report.pulled_tokens:,} prompt tokens came from {stage.prefill.name}"
            )
        for reason in reasons:
            self._screen.say(f"NOT MET: {reason}")
        content = pd_report_json(report)
        self._workspace.report.parent.mkdir(parents=True, exist_ok=True)
        self._workspace.report.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        return Outcome(content, passed=not reasons)


def _turn(number: int, reply: Reply, counted: PromptTokens, moved: Transfers) -> PdTurn:
    return PdTurn(
        turn=number,
        prefill_engine=reply.prefill_engine,
        decode_engine=reply.engine,
        reason=reply.reason,
        prompt_tokens=reply.prompt_tokens,
        computed_tokens=counted.computed,
        cached_tokens=counted.cached,
        pulled_tokens=counted.transferred,
        path=moved.path,
        size_bytes=moved.size_bytes,
        seconds=moved.seconds,
        ttft_seconds=reply.ttft_seconds,
    )


async def _counted_since(
    session: aiohttp.ClientSession, url: str, before: PromptTokens, expected_tokens: int
) -> PromptTokens:
    """Wait until the engine has counted a prompt, as it may do after answering."""
    end = time.monotonic() + COUNTERS_DEADLINE_SECONDS
    while (counted := await read_prompt_tokens(session, url) - before).total < expected_tokens:
        if time.monotonic() > end:
            raise ScenarioError(f"{url} counted {counted.total} of {expected_tokens} prompt tokens")
        await asyncio.sleep(POLL_SECONDS)
    return counted
