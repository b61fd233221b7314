"""The stage of the P/D show: two real engines on what they take for two nodes."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nearkv.demo.engines import Engine, real_engine, transfer_args
from nearkv.demo.launching import LaunchedProcess
from nearkv.demo.services import AgentRole, Service, agent
from nearkv.demo.stage import enter_together
from nearkv.demo.workspace import Progress, Workspace

PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class PdStage:
    """A prefill and a decode engine, each with an agent of its own."""

    prefill: Engine
    decode: Engine
    agents: tuple[Service, Service]

    @property
    def processes(self) -> tuple[LaunchedProcess, ...]:
        """All processes of the stage."""
        engines = (self.prefill.process, self.decode.process)
        return (*engines, *(service.process for service in self.agents))


@asynccontextmanager
async def set_pd_stage(
    model_dir: Path, workspace: Workspace, progress: Progress
) -> AsyncIterator[PdStage]:
    """Run both engines and both agents for the length of a block.

    The agents name different nodes, so KV goes from one to the other over TCP.
    """
    async with AsyncExitStack() as stack:
        # Unix socket paths may be 107 bytes long, too few for a path below most checkouts.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nearkv-")))
        sockets = {role: folder / role for role in ROLES}
        engines = await enter_together(
            stack,
            [
                real_engine(
                    model_dir,
                    name=f"engine-{role}",
                    model_name=model_dir.name,
                    extra_args=transfer_args(f"engine-{role}", sockets[role]),
                    workspace=workspace,
                    progress=progress,
                )
                for role in ROLES
            ],
        )
        agents = [
            await stack.enter_async_context(
                agent(
                    [engine],
                    role=AgentRole(node=f"node-{role}", engine_role=role, socket_dir=sockets[role]),
                    workspace=workspace,
                    progress=progress,
                )
            )
            for role, engine in zip(ROLES, engines, strict=True)
        ]
        yield PdStage(engines[0], engines[1], (agents[0], agents[1]))
