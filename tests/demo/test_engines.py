import json
from pathlib import Path

import aiohttp
import pytest

from nearkv.demo.engines import (
    EngineAddresses,
    double_engine,
    engine_addresses,
    real_engine,
    real_engine_spec,
    startup_stage,
)
from nearkv.demo.errors import SetUpError
from nearkv.demo.workspace import Workspace

ADDRESSES = EngineAddresses(8001, "ipc:///sockets/kv-events", "ipc:///sockets/kv-replay")


def option(command, name):
    return command[command.index(name) + 1]


def test_command_of_a_real_engine():
    spec = real_engine_spec(
        Path("/models/tiny"),
        name="engine-a",
        model_name="tiny",
        addresses=ADDRESSES,
        workspace=Workspace(Path("/checkout")),
        extra_args=("--max-model-len", "512"),
    )
    assert spec.command[0] == "/checkout/.venv-engine/bin/python"
    assert option(spec.command, "--host") == "127.0.0.1"
    assert option(spec.command, "--port") == "8001"
    assert spec.command[-2:] == ("--max-model-len", "512")
    events = json.loads(option(spec.command, "--kv-events-config"))
    assert events["endpoint"] == "ipc:///sockets/kv-events"
    assert events["topic"] == "kv@engine-a@tiny"
    assert spec.env["OMP_NUM_THREADS"] == "1"


def test_addresses_are_short_enough_for_unix_sockets():
    with engine_addresses() as addresses:
        folder = Path(addresses.kv_events.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o077 == 0
        assert len(addresses.kv_replay) < 107
    assert not folder.exists()


@pytest.mark.parametrize(
    ("log", "stage"),
    [
        ("", "importing vLLM"),
        ("Initializing a V1 LLM engine (v0.32.0)", "starting the engine core"),
        ("Initializing a V1 LLM engine\nStarting to load model x", "loading weights"),
        ("Starting to load model x\nCPU KV cache size: 5 tokens", "warming up"),
        ("Starting vLLM server on http", "opening the server"),
    ],
    ids=["empty", "core", "weights", "cache", "server"],
)
def test_stage_is_the_latest_in_the_log(log, stage):
    assert startup_stage(log) == stage


async def test_missing_engine_environment_is_explained(tmp_path):
    with pytest.raises(SetUpError, match="make setup"):
        async with real_engine(tmp_path, workspace=Workspace(tmp_path)):
            pass


async def test_double_needs_a_checkout(tmp_path):
    with pytest.raises(SetUpError, match="checkout"):
        async with double_engine(workspace=Workspace(tmp_path)):
            pass


async def test_double_is_ready_when_it_is_yielded():
    async with (
        double_engine(name="double-under-test") as engine,
        aiohttp.ClientSession() as session,
        session.get(f"{engine.url}/v1/models") as response,
    ):
        models = await response.json()
    assert [model["id"] for model in models["data"]] == [engine.model_name]
