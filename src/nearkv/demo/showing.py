"""The whole show: set the stage, play the scenario under each policy, report, keep serving."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import aiohttp
import msgspec

from nearkv.demo.errors import LaunchError, ScenarioError
from nearkv.demo.launching import LaunchedProcess
from nearkv.demo.playing import Player
from nearkv.demo.rendering import Screen, curl_line
from nearkv.demo.report import PolicyReport, report_json, shortcomings
from nearkv.demo.scenario import topics
from nearkv.demo.services import ingress
from nearkv.demo.stage import EngineKind, Stage, casualties, set_stage
from nearkv.demo.workspace import Workspace

JUDGED_POLICY = "prefix-first"
OTHER_POLICIES = ("cost", "round-robin", "least-loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What to show. ``model_dir`` is None for engine doubles; ``port`` is the ingress'."""

    engine: EngineKind
    model_dir: Path | None
    compare: bool
    rounds: int
    port: int | None
    keep_serving: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report as JSON-like data, and whether the bars were met."""

    report: dict[str, object]
    passed: bool


class Show:
    """One run of the demonstration."""

    def __init__(self, options: ShowOptions, workspace: Workspace, screen: Screen) -> None:
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
                set_stage(options.engine, options.model_dir, self._workspace, screen.progress)
            )
            judged_ingress = await stack.enter_async_context(
                ingress(
                    stage.agent.url,
                    policy=JUDGED_POLICY,
                    workspace=self._workspace,
                    progress=screen.progress,
                    port=options.port,
                )
            )
            processes = (*stage.processes, judged_ingress.process)
            try:
                reports = await self._play_all(stage, judged_ingress.url)
            except ScenarioError as error:
                raise ScenarioError("\n".join([str(error), *casualties(processes)])) from error
            outcome = self._report(stage, reports)
            if options.keep_serving:
                screen.say(f"\nserving; try\n  {curl_line(judged_ingress.url, stage.model_name)}")
                screen.say("Ctrl-C stops everything")
                await watch_processes(processes)
            return outcome

    async def _play_all(self, stage: Stage, judged_url: str) -> list[PolicyReport]:
        """Play under the judged policy and, to compare, under the others."""
        reports = [await self._play(stage, JUDGED_POLICY, judged_url)]
        self._screen.totals(reports[0])
        for policy in OTHER_POLICIES if self._options.compare else ():
            async with ingress(
                stage.agent.url,
                policy=policy,
                workspace=self._workspace,
                progress=self._screen.progress,
            ) as other:
                reports.append(await self._play(stage, policy, other.url))
        return reports

    async def _play(self, stage: Stage, policy: str, url: str) -> PolicyReport:
        self._screen.say(f"\npolicy {policy}")
        async with aiohttp.ClientSession() as session:
            player = Player(
                session=session,
                ingress_url=url,
                engine_urls=tuple(engine.url for engine in stage.engines),
                model_name=stage.model_name,
                policy=policy,
                audience=self._screen,
            )
            return await player.play(topics(self._options.rounds))

    def _report(self, stage: Stage, reports: list[PolicyReport]) -> Outcome:
        """Show the comparison and the verdict, and write the report file."""
        if len(reports) > 1:
            self._screen.comparison(reports)
        self._screen.verdict(reports[0])
        report = report_json(engine=self._options.engine, model=stage.model_name, reports=reports)
        self._workspace.report.parent.mkdir(parents=True, exist_ok=True)
        self._workspace.report.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        return Outcome(report, passed=not shortcomings(reports[0]))


async def watch_processes(processes: tuple[LaunchedProcess, ...]) -> NoReturn:
    """Wait until cancelled; raise ``LaunchError`` when a process dies."""
    waiting = [asyncio.ensure_future(process.wait()) for process in processes]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()
    raise LaunchError("\n".join(casualties(processes)))
