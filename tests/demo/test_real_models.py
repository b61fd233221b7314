"""The two models on real vLLM. Slow: two engine starts of half a minute each."""

import hashlib
import struct

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import real_engine
from nearkv.demo.models import ensure_model
from nearkv.demo.workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def workspace():
    workspace = Workspace.default()
    ensure_engine_env(workspace)
    return workspace


async def post(session, url, **body):
    timeout = aiohttp.ClientTimeout(total=120)
    async with session.post(url, json={"temperature": 0, **body}, timeout=timeout) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def replay(endpoint):
    """Ask for all KV event batches from the first on."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart([b"", struct.pack(">Q", 0)])
        batches = []
        while await socket.poll(10_000):
            *_, sequence, payload = await socket.recv_multipart()
            if struct.unpack(">q", sequence) == (-1,):
                return batches
            batches.append(msgspec.msgpack.decode(payload))
    raise AssertionError("the replay has no end")


async def test_small_model_is_coherent(workspace):
    model_dir = ensure_model("small", workspace)
    async with (
        real_engine(model_dir, name="small-under-test") as engine,
        aiohttp.ClientSession() as session,
    ):
        completion = await post(
            session,
            f"{engine.url}/v1/completions",
            model="small",
            prompt="The capital of France is",
            max_tokens=5,
        )
        chat = await post(
            session,
            f"{engine.url}/v1/chat/completions",
            model="small",
            messages=[{"role": "user", "content": "What is the capital of Italy?"}],
            max_tokens=24,
        )
    assert completion["choices"][0]["text"].startswith(" Paris")
    choice = chat["choices"][0]
    assert choice["message"]["content"] == "The capital of Italy is Rome."
    assert choice["finish_reason"] == "stop"  # so the end-of-turn token works as well


async def test_tiny_model_reports_its_cache(workspace):
    model_dir = ensure_model("tiny", workspace)
    async with (
        real_engine(model_dir, name="tiny-under-test") as engine,
        aiohttp.ClientSession() as session,
    ):
        request = {"model": "tiny", "prompt": list(range(100, 200)), "max_tokens": 4}
        url = f"{engine.url}/v1/completions"
        first, second = [await post(session, url, **request) for _ in range(2)]
        batches = await replay(engine.kv_replay)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert first["choices"][0]["text"].isascii()
    [event] = batches[0][1]
    assert event["type"] == "BlockStored"
    assert event["token_ids"] == list(range(100, 196))
    assert engine.process.exit_status is not None


def test_tiny_model_is_the_same_wherever_it_is_made(workspace, tmp_path):
    elsewhere = Workspace(tmp_path)
    elsewhere.engine_venv.parent.mkdir(exist_ok=True)
    elsewhere.engine_venv.symlink_to(workspace.engine_venv)
    (tmp_path / "LICENSE").symlink_to(workspace.root / "LICENSE")

    def digests(root):
        folder = ensure_model("tiny", root)
        return {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "tokenizer.json", "config.json")
        }

    assert digests(elsewhere) == digests(workspace)
