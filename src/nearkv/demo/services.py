"""Starting the agent and the ingress on the loopback interface, from files written for them."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRole:
    """What an agent is in a demonstration: its node, its engines' work, whether KV moves.

    ``socket_dir`` is where engines find it; ``None`` leaves transfers off.
    """

    node: str = "demo"
    engine_role: str = "both"
    socket_dir: Path | None = None
    peer_port: int = 0
    paths: tuple[str, ...] = ("tcp",)


def agent_config(port: int, engines: Sequence[Engine], role: AgentRole) -> dict[str, object]:
    """Give the configuration of an agent that watches these engines."""
    config: dict[str, object] = {
        "node": role.node,
        "listen": f"127.0.0.1:{port}",
        "engines": [
            {
                "id": engine.name,
                "url": engine.url,
                "role": role.engine_role,
                "kv_events": engine.kv_events,
                "kv_replay": engine.kv_replay,
            }
            for engine in engines
        ],
    }
    if role.socket_dir is not None:
        config["transfer"] = {
            "socket_dir": str(role.socket_dir),
            "peer_listen": f"127.0.0.1:{role.peer_port}",
            "paths": list(role.paths),
        }
    return config


def ingress_config(
    port: int, *, policy: str, agent_urls: Sequence[str], pd_mode: str = "auto"
) -> dict[str, object]:
    """Give the configuration of an ingress that learns its engines from these agents."""
    return {
        "listen": f"127.0.0.1:{port}",
        "policy": policy,
        "agents": list(agent_urls),
        "pd": {"mode": pd_mode},
    }


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
    role: AgentRole | None = None,
    workspace: Workspace | None = None,
    progress: Progress = silent,
    port: int | None = None,
) -> AsyncIterator[Service]:
    """Run an agent for the length of a block."""
    workspace = workspace or Workspace.default()
    port = port or free_port()
    role = role or AgentRole()
    name = "agent" if role.socket_dir is None else f"agent-{role.node}"
    config = agent_config(port, engines, role)
    spec = service_spec("agent", name=name, config=config, workspace=workspace)
    async with _ready_service(spec, port, progress) as service:
        yield service


@asynccontextmanager
async def ingress(
    *agent_urls: str,
    policy: str = "prefix-first",
    pd_mode: str = "auto",
    workspace: Workspace | None = None,
    progress: Progress = silent,
    port: int | None = None,
) -> AsyncIterator[Service]:
    """Run an ingress for the length of a block."""
    workspace = workspace or Workspace.default()
    port = port or free_port()
    config = ingress_config(port, policy=policy, agent_urls=agent_urls, pd_mode=pd_mode)
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
