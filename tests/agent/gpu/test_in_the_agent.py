"""The whole agent on a host with GPUs: status, summary and series come from NVML."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from nearkv.agent.app import GPUS, build_app
from nearkv.agent.gpu.settings import GpuSettings
from nearkv.agent.settings import AgentSettings
from nearkv.node_summary import SUMMARY_PATH
from tests.agent.gpu.conftest import until
from tests.doubles.nvml.hosts import hosts_with, uuid_of


@pytest.fixture
async def client(nvml):
    double = nvml(hosts_with(2))
    gpu = GpuSettings(
        library_dir=double.library_dir, interval_seconds=0.05, pod_resources_socket=None
    )
    app = build_app(AgentSettings(node="n1", gpu=gpu))
    async with TestClient(TestServer(app)) as client:
        await until(app[GPUS].summaries)
        client.double = double
        yield client
    assert double.holders() == []


async def told(client, path):
    async with client.get(path) as answer:
        assert answer.status == 200
        return await (answer.json() if path.startswith("/v1") else answer.text())


async def test_status(client):
    status = await told(client, "/v1/status")
    assert [device["uuid"] for device in status["gpu"]["devices"]] == [uuid_of(0), uuid_of(1)]
    assert status["gpu"]["pods_missing"] == "off"
    client.double.raise_xid(1, 79)
    await until(client.app[GPUS].problems)
    status = await told(client, "/v1/status")
    assert f"GPU 1 ({uuid_of(1)}) failed: Xid 79" in status["problems"]


async def test_summary(client):
    async def devices():
        return (await told(client, SUMMARY_PATH)).get("devices")

    for _ in range(200):
        if found := await devices():
            break
    assert [device["id"] for device in found] == [uuid_of(0), uuid_of(1)]
    assert found[0]["health"] == "ok"


async def test_metrics(client):
    text = await told(client, "/metrics")
    assert f'nearkv_agent_gpu_healthy{{gpu="{uuid_of(0)}",index="0"}} 1.0' in text


async def test_a_host_without_gpus_is_ready_and_says_why():
    gpu = GpuSettings(pod_resources_socket=None)
    app = build_app(AgentSettings(node="n1", gpu=gpu))
    async with TestClient(TestServer(app)) as client:
        await until(lambda: app[GPUS].watch.ends)
        async with client.get("/readyz") as answer:
            assert answer.status == 200
        status = await told(client, "/v1/status")
    assert status["gpu"]["missing"].startswith("no_driver")
    assert status["gpu"]["devices"] == []
    assert not [problem for problem in status["problems"] if "GPU" in problem]
