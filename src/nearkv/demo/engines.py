"""Starting engines: real vLLM from the engine environment, or the engine double.

Both come as context managers that yield a running, ready ``Engine``, for the demonstration
and for tests alike. KV events of a real engine travel over Unix sockets in a private
folder: of the endpoints that vLLM agrees to bind, these are the only ones that other hosts
and other users cannot reach.
"""

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from nearkv.demo.errors import LaunchError, SetUpError
from nearkv.demo.launching import (
    LaunchedProcess,
    ProcessSpec,
    free_port,
    http_probe,
    running,
    wait_until_ready,
)
from nearkv.demo.workspace import Progress, Workspace, silent

ENGINE_READY_SECONDS = 300.0
DOUBLE_READY_SECONDS = 30.0
MAX_MODEL_LENGTH_TOKENS = 8192
BLOCK_SIZE_TOKENS = 32
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
DOUBLE_MODULE = "tests.doubles.engine"

# What vLLM 0.32 logs at the beginning of a stage, latest stage first.
STARTUP_STAGES = (
    ("Application startup complete", "opening the server"),
    ("Starting vLLM server", "opening the server"),
    ("Starting ZMQ publisher", "opening the server"),
    ("KV cache size", "warming up"),
    ("Starting to load model", "loading weights"),
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Resolved architecture", "reading the model's configuration"),
)


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """Where an engine listens: an HTTP port on 127.0.0.1 and two ZMQ endpoints."""

    port: int
    kv_events: str
    kv_replay: str

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A ready engine. ``process`` ends it; the addresses outlive it."""

    name: str
    model_name: str
    url: str
    kv_events: str
    kv_replay: str
    process: LaunchedProcess

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self.process.pid

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.process.spec.log_path


class DoubleAnnouncement(msgspec.Struct):
    """The line that the engine double prints when it listens."""

    url: str
    kv_events: str
    kv_replay: str


def startup_stage(log: str) -> str:
    """Tell from the end of an engine's log what it is doing."""
    for phrase, stage in STARTUP_STAGES:
        if phrase in log:
            return stage
    return "importing vLLM"


def transfer_args(engine: str, socket_dir: Path) -> tuple[str, ...]:
    """Give the arguments that make a real engine's KV movable by the agent behind a socket."""
    config = {
        "kv_connector": "NodeAgentConnector",
        "kv_connector_module_path": "nearkv.transfer.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"engine": engine, "socket": str(socket_dir / "agent.sock")},
    }
    return ("--kv-transfer-config", json.dumps(config))


@contextmanager
def engine_addresses() -> Iterator[EngineAddresses]:
    """Reserve addresses for one engine, which may be started on them more than once."""
    # Unix socket paths may be 107 bytes long, too few for a path below most checkouts.
    with tempfile.TemporaryDirectory(prefix="nearkv-") as folder:
        yield EngineAddresses(
            port=free_port(),
            kv_events=f"ipc://{folder}/kv-events",
            kv_replay=f"ipc://{folder}/kv-replay",
        )


def real_engine_spec(  # noqa: PLR0913 - keyword-only, what is extra has defaults
    model_dir: Path,
    *,
    name: str,
    model_name: str,
    addresses: EngineAddresses,
    workspace: Workspace,
    extra_args: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
) -> ProcessSpec:
    """Build the command line of a real engine; what is ``extra`` comes last and so wins.

    The module is run rather than vLLM's console script, which fails on the CPU build: it
    looks for package metadata under the name ``vllm``.
    """
    kv_events_config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": addresses.kv_events,
        "replay_endpoint": addresses.kv_replay,
        "topic": f"kv@{name}@{model_name}",
    }
    return ProcessSpec(
        name=name,
        command=(
            *(str(workspace.engine_python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_dir.resolve()), "--served-model-name", model_name),
            *("--host", "127.0.0.1", "--port", str(addresses.port)),
            *("--block-size", str(BLOCK_SIZE_TOKENS)),
            *("--max-model-len", str(MAX_MODEL_LENGTH_TOKENS)),
            "--enforce-eager",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--enable-scale-out",
            *("--kv-events-config", json.dumps(kv_events_config)),
            *extra_args,
        ),
        # The engine's environment has no nearkv installed; its connector comes from here.
        env={**ENGINE_ENV, "PYTHONPATH": str(workspace.root / "src"), **(extra_env or {})},
        log_path=workspace.logs / f"{name}.log",
        cwd=workspace.root,
    )


@asynccontextmanager
async def real_engine(  # noqa: PLR0913 - all but the model have defaults and are keyword-only
    model_dir: Path,
    *,
    name: str = "engine-a",
    model_name: str | None = None,
    extra_args: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    addresses: EngineAddresses | None = None,
    workspace: Workspace | None = None,
    deadline_seconds: float = ENGINE_READY_SECONDS,
    progress: Progress = silent,
) -> AsyncIterator[Engine]:
    """Run a real vLLM for the length of a block.

    ``model_name`` is the name it serves under, by default that of the folder. Give the same
    ``addresses`` again to restart an engine where it was. The engine environment must be
    ready (see ``engine_env``). Raises ``LaunchError`` with the end of the log.
    """
    workspace = workspace or Workspace.default()
    if not workspace.engine_python.is_file():
        raise SetUpError("there is no engine environment; make it with: make setup")
    model_name = model_name or model_dir.name
    async with AsyncExitStack() as stack:
        addresses = addresses or stack.enter_context(engine_addresses())
        spec = real_engine_spec(
            model_dir,
            name=name,
            model_name=model_name,
            addresses=addresses,
            workspace=workspace,
            extra_args=extra_args,
            extra_env=extra_env,
        )
        process = await stack.enter_async_context(running(spec))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await wait_until_ready(
            process,
            http_probe(session, f"{addresses.url}/health"),
            deadline_seconds=deadline_seconds,
            stage_of=startup_stage,
            progress=progress,
        )
        yield Engine(
            name=name,
            model_name=model_name,
            url=addresses.url,
            kv_events=addresses.kv_events,
            kv_replay=addresses.kv_replay,
            process=process,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleSpeed:
    """The time model of the double: a small model on one core, made a hundred times faster."""

    prefill_tokens_per_second: float = 20_000.0
    decode_seconds_per_token: float = 0.002
    num_blocks: int = 4096


def double_engine_spec(name: str, workspace: Workspace, speed: DoubleSpeed) -> ProcessSpec:
    """Build the command line of an engine double; it picks its own ports and prints them."""
    return ProcessSpec(
        name=name,
        command=(
            *(sys.executable, "-m", DOUBLE_MODULE, "--port", "0", "--model", "tiny"),
            *("--block-size", str(BLOCK_SIZE_TOKENS), "--num-blocks", str(speed.num_blocks)),
            *("--prefill-tokens-per-second", str(speed.prefill_tokens_per_second)),
            *("--decode-seconds-per-token", str(speed.decode_seconds_per_token)),
        ),
        env={},
        log_path=workspace.logs / f"{name}.log",
        stdout_path=workspace.logs / f"{name}.out",
        cwd=workspace.root,
    )


@asynccontextmanager
async def double_engine(
    *,
    name: str = "engine-a",
    workspace: Workspace | None = None,
    speed: DoubleSpeed | None = None,
    progress: Progress = silent,
) -> AsyncIterator[Engine]:
    """Run an engine double for the length of a block.

    Raises ``SetUpError`` outside a checkout, for the double is part of the tests.
    """
    workspace = workspace or Workspace.default()
    if not (workspace.root / "tests" / "doubles" / "engine").is_dir():
        raise SetUpError("the engine double is part of the tests: run this in a checkout")
    spec = double_engine_spec(name, workspace, speed or DoubleSpeed())
    async with running(spec) as process:
        announcement = await _read_announcement(process, progress)
        yield Engine(
            name=name,
            model_name="tiny",
            url=announcement.url,
            kv_events=announcement.kv_events,
            kv_replay=announcement.kv_replay,
            process=process,
        )


async def _read_announcement(process: LaunchedProcess, progress: Progress) -> DoubleAnnouncement:
    """Wait for the double's one line on standard output."""
    out = process.spec.stdout_path
    assert out is not None  # noqa: S101 - set by double_engine_spec

    async def has_announced() -> bool:
        return b"\n" in out.read_bytes()

    await wait_until_ready(
        process, has_announced, deadline_seconds=DOUBLE_READY_SECONDS, progress=progress
    )
    line = out.read_bytes().split(b"\n", 1)[0]
    try:
        return msgspec.json.decode(line, type=DoubleAnnouncement)
    except msgspec.MsgspecError as error:
        raise LaunchError(f"{process.name}: announced {line!r}: {error}") from error
