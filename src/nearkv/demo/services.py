"""Starting the agent and the ingress on the loopback interface, from files written for them."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import yaml

from nearkv.demo.engines import Engine
from nearkv.demo.launching import (
    LaunchedProcess,
    ProcessSpec,
    free_port,
    http_probe,
    running,
    wait_until_ready,
)
from nearkv.demo.workspace import Progress, Workspace, silent

SERVICE_READY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """A ready agent or ingress."""

    url: str
    process: LaunchedProcess


def agent_config(port: int, engines: Sequence[Engine]) -> dict[str, object]:
    """Give the configuration of an agent that watches these engines."""
    return {
        "node": "demo",
        "listen": f"127.0.0.1:{port}",
        "engines": [
            {
                "id": engine.name,
                "url": engine.url,
                "kv_events": engine.kv_events,
                "kv_replay": engine.kv_replay,
            }
            for engine in engines
        ],
    }


def ingress_config(port: int, *, policy: str, agent_url: str) -> dict[str, object]:
    """Give the configuration of an ingress that learns its engines from one agent."""
    return {"listen": f"127.0.0.1:{port}", "policy": policy, "agents": [agent_url]}


def service_spec(
    component: str, *, name: str, config: Mapping[str, object], workspace: Workspace
) -> ProcessSpec:
    """Write the configuration file of a component and build its command line."""
    config_path = workspace.config / f"{name}.yaml"
    config_path.parent.mkdir(parents=True, exist_ok=True)
    config_path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-m", f"nearkv.{component}", "--config", str(config_path)),
        env={"PYTHONUNBUFFERED": "1"},
        log_path=workspace.logs / f"{name}.log",
        cwd=workspace.root,
    )


@asynccontextmanager
async def agent(
    engines: Sequence[Engine],
    *,
    workspace: Workspace | None = None,
    progress: Progress = silent,
    port: int | None = None,
) -> AsyncIterator[Service]:
    """Run an agent for the length of a block."""
    workspace = workspace or Workspace.default()
    port = port or free_port()
    spec = service_spec(
        "agent", name="agent", config=agent_config(port, engines), workspace=workspace
    )
    async with _ready_service(spec, port, progress) as service:
        yield service


@asynccontextmanager
async def ingress(
    agent_url: str,
    *,
    policy: str = "prefix-first",
    workspace: Workspace | None = None,
    progress: Progress = silent,
    port: int | None = None,
) -> AsyncIterator[Service]:
    """Run an ingress for the length of a block."""
    workspace = workspace or Workspace.default()
    port = port or free_port()
    config = ingress_config(port, policy=policy, agent_url=agent_url)
    spec = service_spec("ingress", name=f"ingress-{policy}", config=config, workspace=workspace)
    async with _ready_service(spec, port, progress) as service:
        yield service


@asynccontextmanager
async def _ready_service(
    spec: ProcessSpec, port: int, progress: Progress
) -> AsyncIterator[Service]:
    url = f"http://127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(running(spec))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await wait_until_ready(
            process,
            http_probe(session, f"{url}/readyz"),
            deadline_seconds=SERVICE_READY_SECONDS,
            progress=progress,
        )
        yield Service(url, process)
