"""Real engines whose KV can move, behind agents and an ingress that tests make and break.

Engines are dear (half a minute each), agents and ingresses are not: one prefill and one decode
engine live for a whole module, and each test puts agents of its own behind their sockets. A
folder of sockets is a link, so that one agent can serve both engines (one node) or each its
own (two nodes).
"""

import json
import mmap
import os
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key
from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import Engine, real_engine, transfer_args
from nearkv.demo.launching import free_port
from nearkv.demo.models import ensure_model
from nearkv.demo.stage import enter_together
from nearkv.demo.workspace import Workspace
from nearkv.ingress.app import KNOWLEDGE
from nearkv.ingress.app import build_app as build_ingress
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import running
from tests.integration.stack import ANY_PORT, LASTING, PATIENT, eventually

DEADLINE = aiohttp.ClientTimeout(total=120)
BLOCKS = 1024
CACHE = ("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "4096")
NODES = {"p": "n1", "d": "n2"}


@dataclass
class Engines:
    """The two engines, ``p`` and ``d``, and the links that their sockets lie behind."""

    folder: Path
    engines: dict[str, Engine]
    session: aiohttp.ClientSession

    def point(self, name: str, folder: Path) -> None:
        """Have an engine's socket be the one in ``folder`` from now on."""
        fresh = self.folder / f"{name}.new"
        fresh.symlink_to(folder)
        fresh.rename(self.folder / name)

    async def complete(self, name: str, prompt, **fields):
        """Ask one engine directly."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
        url = f"{self.engines[name].url}/v1/completions"
        async with self.session.post(url, json=body, timeout=DEADLINE) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def counter(self, name: str, series: str) -> float:
        """Sum a counter of an engine's over all its labels that contain ``series``."""
        url = f"{self.engines[name].url}/metrics"
        async with self.session.get(url, timeout=DEADLINE) as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


def patient_transfer(name: str, folder: Path) -> tuple[str, ...]:
    """Give the arguments of an engine whose deadlines outlast a machine that stands still."""
    option, text = transfer_args(name, folder)
    config = json.loads(text)
    config["kv_connector_extra_config"] |= {"lookup_seconds": 20.0, "pull_seconds": 60.0}
    return option, json.dumps(config)


def stock_nixl(_name: str, _folder: Path) -> tuple[str, ...]:
    """Give the arguments of an engine with vLLM's own NixlConnector."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return ("--kv-transfer-config", json.dumps(config))


@asynccontextmanager
async def two_engines(connector=patient_transfer):
    """Run both engines with a connector; yields :class:`Engines`."""
    workspace = Workspace.default()
    ensure_engine_env(workspace)
    model = ensure_model("tiny", workspace)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nk-")))
        contexts = [
            real_engine(
                model,
                name=f"pd-{name}",
                model_name="tiny",
                extra_args=(*connector(name, folder / name), *CACHE),
                extra_env={
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                    "UCX_NET_DEVICES": "lo",
                },
            )
            for name in NODES
        ]
        started = await enter_together(stack, contexts)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Engines(folder, dict(zip(NODES, started, strict=True)), session)


@dataclass
class Stack:
    """Agents and an ingress over the engines."""

    engines: Engines
    url: str
    agents: dict[str, aiohttp.web.Application]
    agent_urls: list[str]
    knowledge: object
    answers: list[dict] = field(default_factory=list)

    async def post(self, path: str, body: dict, **options):
        """Ask the ingress; returns headers and the answer's JSON."""
        async with self.engines.session.post(
            self.url + path, json={"model": "tiny", "temperature": 0, **body}, timeout=DEADLINE,
            **options,
        ) as response:  # fmt: skip
            answer = await response.json()
            assert response.status == 200, answer
            return response.headers, answer

    async def knows_blocks(self, name: str, prompt: list[int]) -> None:
        """Wait until the ingress knows that an engine holds all whole blocks of a prompt."""
        fleet = self.knowledge.fleet
        view = fleet.engines[name]
        root = root_key(KeyNamespace(view.info.key_model))
        keys = chain_keys(root, pack_tokens(prompt), view.info.block_size)
        if keys:
            await eventually(
                lambda: fleet.match(keys).get(name, 0) == len(keys), what="blocks are known"
            )

    async def statuses(self) -> list[dict]:
        """What the agents say of themselves."""
        found = []
        for url in self.agent_urls:
            async with self.engines.session.get(f"{url}/v1/status", timeout=DEADLINE) as response:
                found.append(await response.json())
        return found


def _agent_settings(engines: Engines, names, *, node, folder, roles, transfer, mode):
    configured = [
        {
            "id": name,
            "url": engine.url,
            "role": roles[name],
            "transfer": mode,
            "kv_events": engine.kv_events,
            "kv_replay": engine.kv_replay,
        }
        for name, engine in engines.engines.items()
        if name in names
    ]
    return AgentSettings.model_validate(
        {
            "node": node,
            "engines": configured,
            "scrape": {"interval_seconds": 0.2, "timeout_seconds": 20.0},
            "transfer": {"socket_dir": str(folder), "peer_listen": "127.0.0.1:0", **transfer},
        }
    )


@asynccontextmanager
async def agents_and_ingress(
    engines: Engines, path: str, *, roles=None, transfer=None, mode="agent", **ingress
):
    """Run one agent for both engines (``shm``) or one for each (any other path)."""
    roles = roles or {"p": "prefill", "d": "decode"}
    transfer = {**(transfer or {}), **({} if path == "shm" else {"paths": [path]})}
    groups = [("n1", ("p", "d"))] if path == "shm" else [("n1", ("p",)), ("n2", ("d",))]
    async with AsyncExitStack() as stack:
        urls, agents = [], {}
        for node, names in groups:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nk-")))
            app = build_agent(
                _agent_settings(
                    engines,
                    names,
                    node=node,
                    folder=folder,
                    roles=roles,
                    transfer=transfer,
                    mode=mode,
                )
            )
            for name in names:
                engines.point(name, folder)
            urls.append((await stack.enter_async_context(running(app, ANY_PORT))).url)
            agents[node] = app
        settings = {
            "agents": urls,
            "pd": {"mode": "always", "min_tokens": 0},
            "freshness": LASTING,
            "deadlines": PATIENT,
            **ingress,
        }
        app = await build_ingress(IngressSettings.model_validate(settings))
        address = await stack.enter_async_context(running(app, ANY_PORT))
        knowledge = app[KNOWLEDGE]
        await eventually(
            lambda: (
                len(knowledge.fleet.engines) == len(NODES)
                and all(
                    v.info.transfer and v.info.state == "ready"
                    for v in knowledge.fleet.engines.values()
                )
                and all(a.connected and a.synced for a in knowledge.fleet.agents.values())
            ),
            what="both engines can transfer",
            seconds=90,
        )
        yield Stack(engines, address.url, agents, urls, knowledge)


def worker_pid(engine: Engine) -> int:
    """Return the process of an engine that holds its KV memory."""
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        try:
            if os.getpgid(pid) == engine.pid and memory_file(pid) is not None:
                return pid
        except (ProcessLookupError, PermissionError, FileNotFoundError):
            continue
    raise AssertionError(f"no process of {engine.name} holds KV memory")


def memory_file(pid: int) -> Path | None:
    """Return the path under which a process's KV memory can be opened."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(path.readlink()).startswith("/memfd:nearkv-kv"):
                return path
        except FileNotFoundError:
            continue
    return None


@contextmanager
def corrupted(engine: Engine):
    """Have all of an engine's KV memory be wrong for the length of a block."""
    with memory_file(worker_pid(engine)).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        content = np.frombuffer(memory, np.uint8)
        try:
            content ^= 0x55
            yield
        finally:
            content ^= 0x55
            del content


def resident_bytes(process_group: int) -> int:
    """Add up what the processes of a group hold, shared memory left out."""
    total = 0
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and os.getpgid(int(path.name)) == process_group:
                fields = (path / "status").read_text().splitlines()
                total += sum(int(f.split()[1]) for f in fields if f.startswith("RssAnon:"))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return total * 1024
