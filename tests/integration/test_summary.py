"""From engines through a real agent to the extender's snapshot, and from its GPUs to its Node."""

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from nearkv.agent.app import NODE_STATE
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.agent.waking import ROOM_ANNOTATION
from nearkv.extender.view.cluster import ClusterView, ViewConfig, levels_reader
from nearkv.extender.view.directory import AgentDiscovery
from nearkv.extender.view.nodes import NodeRules
from nearkv.extender.view.polling import CollectLimits
from nearkv.extender.view.state import StateLimits
from nearkv.kube.access import ApiAccess
from nearkv.node_summary import DeviceSummary
from nearkv.serving import running
from nearkv.state.model import PathReading
from tests.doubles.api_server import ApiServerDouble, node_object, pod_object
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.extender.view.test_state import Told
from tests.extender.view.things import LEVELS
from tests.integration.stack import ANY_PORT, eventually

DEADLINE_SECONDS = 40
DOCUMENT = "A long winter closed the pass above the village for weeks. " * 30
FAST_SUMMARY = {"interval_seconds": 0.1, "drift_seconds": 0.05}
RACK = {"rack": "r1", "zone": "z"}


def agent_settings(engine=None, **fields):
    known = {"id": "e", "group": "g", "kv_bytes_per_token": 1000}
    engines = [] if engine is None else [{"url": engine.url, **known}]
    return {
        "node": "n1",
        "listen": "127.0.0.1:0",
        "engines": engines,
        "scrape": {"interval_seconds": 0.1},
        "summary": FAST_SUMMARY,
        **fields,
    }


@asynccontextmanager
async def agent_process(folder, engine):
    """Run ``nearkv-agent`` over one engine; yield the process and its URL."""
    config = folder / "agent.json"
    config.write_text(json.dumps(agent_settings(engine)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.agent", "--config", str(config)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (line := json.loads(await process.stderr.readline()))["event"] != "listening":
                pass
        yield process, line["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


@asynccontextmanager
async def viewing(api, *urls):
    """Run a view of the API server double's cluster and of these agents."""
    async with ApiAccess.plain(api.url) as access:
        config = ViewConfig(
            levels=LEVELS,
            nodes=NodeRules(levels_of=levels_reader(LEVELS)),
            agents=AgentDiscovery(urls=urls),
            publish_seconds=0.01,
            sweep_seconds=0.02,
            collect=CollectLimits(least_pause_seconds=0.01, longest_pause_seconds=0.2),
            state=StateLimits(settle_seconds=0.0),
        )
        view = ClusterView(access, config, Told())
        task = asyncio.create_task(view.run())
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await view.wait_until_synced()
            yield view
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def held_bytes(view):
    found = view.snapshot().groups.get("g")
    return 0 if found is None else found.held_bytes.sum()


async def complete(engine, text=DOCUMENT):
    async with (
        aiohttp.ClientSession() as client,
        client.post(engine.url + "/v1/completions", json={"model": "tiny", "prompt": text}) as done,
    ):
        assert done.status == 200


async def test_what_an_engine_holds_is_in_the_extenders_snapshot(tmp_path):
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EngineDouble(EngineDoubleConfig(num_blocks=600)))
        process, url = await stack.enter_async_context(agent_process(tmp_path, engine))
        api = await stack.enter_async_context(ApiServerDouble())
        labels = {"nearkv.io/group": "g", "nearkv.io/role": "prefill"}
        api.put_all([node_object("n1", labels=RACK), node_object("n2", labels=RACK)])
        api.put(pod_object("e", node="n1", labels=labels))
        view = await stack.enter_async_context(viewing(api, url))
        rows = view.snapshot().rows
        await eventually(lambda: view.stats().reports == 1, what="the agent has reported")
        await engine.wait_for_subscribers()
        await complete(engine)
        await eventually(lambda: held_bytes(view) > 0, what="what it holds is known")
        found = view.snapshot().groups["g"]
        assert found.holders.tolist() == [rows["n1"]]
        assert found.prefill.tolist() == [rows["n1"]]
        assert found.kv_free_bytes[rows["n1"]] > 0
        assert found.kv_bytes_per_token == 1000
        once = held_bytes(view)
        await complete(engine, "Another story altogether, which nobody has told. " * 60)
        await eventually(lambda: held_bytes(view) > once, what="more is held")
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: view.stats().poll_failures, what="the agent is gone")
        assert await process.wait() == 0
        snapshot = view.snapshot()
        assert snapshot.report_seconds[rows["n1"]] == FAST_SUMMARY["interval_seconds"]
        assert held_bytes(view) > once


async def test_an_agent_that_starts_again_is_heard_again_with_its_new_boot(tmp_path):
    async with EngineDouble(EngineDoubleConfig(num_blocks=600)) as engine, ApiServerDouble() as api:
        api.put(node_object("n1", labels=RACK))
        async with AsyncExitStack() as first:
            app = build_agent(AgentSettings.model_validate(agent_settings(engine)))
            address = await first.enter_async_context(running(app, ANY_PORT))
            async with viewing(api, address.url) as view:
                await eventually(lambda: view.stats().reports == 1, what="it has reported")
                reported_at = view.snapshot().reported_at[0]
                await first.aclose()
                await eventually(lambda: view.stats().agents_failing == 1, what="it is gone")
                again = build_agent(AgentSettings.model_validate(agent_settings(engine)))
                async with running(again, address):
                    await eventually(lambda: view.stats().agents_failing == 0, what="it is back")
                    await eventually(
                        lambda: view.snapshot().reported_at[0] > reported_at, what="it is fresh"
                    )
                assert view.stats().reports_refused == {}


async def test_measured_paths_reach_the_snapshot_by_pair_and_by_class():
    async with ApiServerDouble() as api:
        api.put_all([node_object("n1", labels=RACK), node_object("n2", labels=RACK)])
        app = build_agent(AgentSettings.model_validate(agent_settings()))
        async with running(app, ANY_PORT) as address, viewing(api, address.url) as view:
            app[NODE_STATE].log.put_path(
                PathReading(
                    source="n2",
                    target="n1",
                    path="tcp",
                    setup_seconds=0.002,
                    bytes_per_second=3e9,
                    points=7,
                ),
                app[NODE_STATE].now(),
            )
            await eventually(lambda: view.snapshot().pairs, what="the pair is known")
            rows = view.snapshot().rows
            assert view.snapshot().pairs[rows["n2"], rows["n1"]].bytes_per_second == 3e9
            await eventually(lambda: 1 in view.snapshot().links, what="the class is known")
            assert view.snapshot().links[1].setup_seconds == 0.002


async def test_an_agent_wakes_parked_pods_once_a_minute_at_most(tmp_path):
    async with ApiServerDouble() as api:
        api.put(node_object("n1"))
        kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
        foreign = DeviceSummary(id="G", total_bytes=100, used_bytes=50, health="ok")
        clean = DeviceSummary(id="G", total_bytes=100, used_bytes=0, health="ok")
        devices = [foreign]
        waking = {"enabled": True, "kubeconfig": str(kubeconfig), "settle_seconds": 0.0}
        settings = AgentSettings.model_validate(agent_settings(waking=waking))
        reads = 0

        def read():
            nonlocal reads
            reads += 1
            return devices

        async def seen_again():
            before = reads
            await eventually(lambda: reads > before + 2, what="the devices are read again")

        def written():
            return api.get("Node", "n1")["metadata"].get("annotations", {}).get(ROOM_ANNOTATION)

        async with running(build_agent(settings, devices=read), ANY_PORT):
            await seen_again()
            devices = [clean]
            await eventually(written, what="the annotation is there", seconds=DEADLINE_SECONDS)
            first = written()
            for _ in range(3):
                devices = [foreign]
                await seen_again()
                devices = [clean]
                await seen_again()
            assert written() == first
            patches = api.record.all("patch")
            assert len(patches) == 1
