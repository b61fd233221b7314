"""Everything that the scenario plays on: two engines and an agent, real or doubles."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nearkv.demo.engines import Engine, double_engine, real_engine
from nearkv.demo.launching import LaunchedProcess
from nearkv.demo.log_tail import log_tail
from nearkv.demo.services import Service, agent
from nearkv.demo.workspace import Progress, Workspace

ENGINE_NAMES = ("engine-a", "engine-b")


class EngineKind(StrEnum):
    """What serves the model."""

    VLLM = "vllm"
    DOUBLE = "double"


@dataclass(frozen=True, slots=True)
class Stage:
    """Ready engines and the agent that watches them."""

    engines: tuple[Engine, ...]
    agent: Service

    @property
    def model_name(self) -> str:
        """Name under which all engines serve the model."""
        return self.engines[0].model_name

    @property
    def processes(self) -> tuple[LaunchedProcess, ...]:
        """All processes of the stage."""
        return (*(engine.process for engine in self.engines), self.agent.process)


@asynccontextmanager
async def set_stage(
    kind: EngineKind, model_dir: Path | None, workspace: Workspace, progress: Progress
) -> AsyncIterator[Stage]:
    """Run two engines and an agent for the length of a block.

    The engines start side by side: each spends most of its start on one core, so on two
    cores this takes little longer than one of them. ``model_dir`` is for real engines only.
    """

    def engine(name: str) -> AbstractAsyncContextManager[Engine]:
        if kind is EngineKind.DOUBLE or model_dir is None:
            return double_engine(name=name, workspace=workspace, progress=progress)
        return real_engine(model_dir, name=name, workspace=workspace, progress=progress)

    async with AsyncExitStack() as stack:
        engines = await enter_together(stack, [engine(name) for name in ENGINE_NAMES])
        yield Stage(
            engines,
            await stack.enter_async_context(agent(engines, workspace=workspace, progress=progress)),
        )


async def enter_together(
    stack: AsyncExitStack, contexts: Sequence[AbstractAsyncContextManager[Engine]]
) -> tuple[Engine, ...]:
    """Enter contexts at the same time; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stack.enter_async_context(context)) for context in contexts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in tasks)


def casualties(processes: Iterable[LaunchedProcess]) -> list[str]:
    """Describe the processes that have ended, with the end of their logs."""
    return [
        f"{process.name} ended with status {process.exit_status}. "
        f"The end of {process.spec.log_path}:\n{log_tail(process.spec.log_path)}"
        for process in processes
        if process.exit_status is not None
    ]
