"""The whole agent with an API server: engines that are pods come, drain, go and start again."""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import pytest

from nearkv.agent.app import GPUS, NODE_STATE, READINESS, build_app
from nearkv.agent.gpu.pod_devices import PodName
from nearkv.agent.kubernetes.joining import KUBERNETES, WORKER_STATUSES
from nearkv.agent.settings import AgentSettings
from nearkv.extender.view.statuses import read_status
from nearkv.kube.objects import WorkerStatus
from nearkv.serving import running
from nearkv.state.codec import FrameReader
from nearkv.state.model import Delta, SnapshotBegin
from tests.agent.kubernetes.things import engine_pod
from tests.agent.worker_status.things import complaints, documented_rights, schema_of_status
from tests.doubles.api_server import ApiServerDouble, Faults, node_object
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import ANY_PORT, FAST_AGENT, eventually

AT_ONCE = {"spread_seconds": 0.0, "seconds_per_write": 0.0}
UPGRADE = "nvidia.com/gpu-driver-upgrade-state"


class Cluster:
    """An API server with the pods of engine doubles, and the agent of node n1."""

    def __init__(self, api, folder):
        self.api = api
        self.kubeconfig = api.write_kubeconfig(folder / "kubeconfig")
        self.app = None
        self.url = ""

    def run_pod(self, engine, name="e", *, ready=True, **fields):
        """Put the pod of an engine into the cluster; return its UID."""
        port = engine.url.rpartition(":")[2]
        annotations = {"nearkv.io/port": port, **fields.pop("annotations", {})}
        value = engine_pod(name, ip="127.0.0.1", annotations=annotations, **fields)
        if not ready:
            value["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        return self.api.put(value)["metadata"]["uid"]

    @asynccontextmanager
    async def agent(self, *, is_ready=True, **settings):
        """Run the agent; its state is in ``state``."""
        merged = {
            **FAST_AGENT,
            "node": "n1",
            "gpu": {"enabled": "off"},
            "kubernetes": {"kubeconfig": str(self.kubeconfig)},
            "worker_status": AT_ONCE,
            **settings,
        }
        self.app = build_app(AgentSettings.model_validate(merged))
        self.app[WORKER_STATUSES]._look_seconds = 0.05
        async with running(self.app, ANY_PORT) as address:
            self.url = address.url
            if is_ready:
                await eventually(lambda: self.app[READINESS].is_ready, what="the agent is ready")
            yield self

    @property
    def state(self):
        return self.app[NODE_STATE]

    def engine_states(self):
        """Return the states of all engines by id, as the state log has them."""
        return {info.id: info.state.value for info in self.state.log.infos.values()}

    async def until(self, states):
        await eventually(lambda: self.engine_states() == states, what=f"engines are {states}")

    async def get(self, path):
        async with aiohttp.ClientSession() as client, client.get(self.url + path) as answer:
            return answer.status, (await answer.read()).decode(errors="replace")

    async def status(self):
        code, body = await self.get("/v1/status")
        assert code == 200
        return json.loads(body)


@asynccontextmanager
async def following(url):
    """Yield the list of (engine, state) as they come by the state stream, and what is gone."""
    seen = []

    async def follow(content):
        reader = FrameReader()
        async for data in content.iter_any():
            for frame in reader.feed(data):
                if isinstance(frame, Delta | SnapshotBegin):
                    seen.extend((info.id, info.state.value) for info in frame.engines)
                if isinstance(frame, Delta):
                    seen.extend((name, "gone") for name in frame.gone)

    async with aiohttp.ClientSession() as client, client.get(url + "/v1/state/stream") as answer:
        task = asyncio.create_task(follow(answer.content))
        try:
            yield seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def engine():
    async with EngineDouble(EngineDoubleConfig(num_blocks=600)) as double:
        yield double


@pytest.fixture
async def cluster(tmp_path):
    async with ApiServerDouble() as api:
        rights = documented_rights()
        api.allow({name: [v for v, of in rights if of == name] for _, name in rights})
        yield Cluster(api, tmp_path)


async def test_a_pod_with_labels_is_an_engine_by_one_list_and_one_watch(cluster, engine):
    uid = cluster.run_pod(engine)
    cluster.run_pod(engine, "web", labels={"app": "web"})
    cluster.run_pod(engine, "elsewhere", node="n2")
    async with cluster.agent():
        await cluster.until({uid: "ready"})
        info = cluster.state.log.infos[uid]
        assert (info.url, info.group, info.role) == (engine.url, "g", "decode")
        await engine.wait_for_subscribers()
        await cluster.api.wait_for_watches()
        seen = cluster.api.record.all("list", "pods") + cluster.api.record.all("watch", "pods")
        assert [each.verb for each in seen] == ["list", "watch"]
        assert {each.query["fieldSelector"] for each in seen} == {"spec.nodeName=n1"}
        assert seen[0].query["resourceVersion"] == "0"
        described = (await cluster.status())["kubernetes"]
        assert described["engines"] == [
            {"engine": uid, "pod": "default/e", "ready": True, "leaving": False}
        ]


async def test_a_pod_that_is_deleted_drains_in_the_stream_before_it_goes(cluster, engine):
    uid = cluster.run_pod(engine)
    async with cluster.agent():
        await cluster.until({uid: "ready"})
        async with following(cluster.url) as seen:
            await eventually(lambda: (uid, "ready") in seen, what="the stream knows it")
            cluster.api.terminate("e")
            await eventually(lambda: (uid, "draining") in seen, what="it drains")
            await cluster.api.wait_until(lambda: cluster.state.trackers[uid].metrics_at is not None)
            read_at = cluster.state.trackers[uid].metrics_at
            await eventually(
                lambda: cluster.state.trackers[uid].metrics_at > read_at, what="it is read again"
            )
            assert cluster.engine_states() == {uid: "draining"}
            engine.kill()
            await eventually(lambda: (uid, "unreachable") in seen, what="it is away")
            await engine.start()
            await eventually(lambda: seen[-1] == (uid, "draining"), what="it drains still")
            cluster.api.delete("Pod", "e")
            await eventually(lambda: (uid, "gone") in seen, what="it is gone")
        await cluster.until({})


async def test_a_pod_that_was_being_deleted_before_it_was_found_never_gets_work(cluster, engine):
    uid = cluster.run_pod(engine)
    cluster.api.terminate("e")
    async with cluster.agent():
        async with following(cluster.url) as seen:
            await eventually(lambda: (uid, "draining") in seen, what="it drains")
            assert (uid, "ready") not in seen
        assert cluster.engine_states() == {uid: "draining"}


async def test_an_engine_counts_as_starting_until_its_pod_is_ready(cluster, engine):
    uid = cluster.run_pod(engine, ready=False)
    async with cluster.agent():
        await cluster.until({uid: "starting"})
        cluster.api.run_pod("e")
        await cluster.until({uid: "ready"})
        ready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
        cluster.api.edit("Pod", "e", ready)
        await cluster.until({uid: "starting"})


async def test_a_container_that_starts_again_is_the_same_engine_anew(cluster, engine):
    uid = cluster.run_pod(engine)
    async with cluster.agent():
        await cluster.until({uid: "ready"})
        before = cluster.state.log.infos[uid].incarnation
        await engine.restart()
        await eventually(
            lambda: cluster.state.log.infos[uid].incarnation != before, what="another incarnation"
        )
        await cluster.until({uid: "ready"})


async def test_pods_come_and_move_while_the_agent_runs(cluster, engine):
    async with cluster.agent(), EngineDouble(EngineDoubleConfig()) as other:
        first = cluster.run_pod(engine)
        await cluster.until({first: "ready"})
        second = cluster.run_pod(other, "f", annotations={"nearkv.io/transfer": "nixl"})
        await cluster.until({first: "ready", second: "ready"})
        await eventually(
            lambda: cluster.state.log.infos[second].transfer is not None,
            what="its KV moves by NIXL",
        )
        assert cluster.state.log.infos[second].transfer.mode == "nixl"
        # The pod's container listens elsewhere from now on.
        cluster.run_pod(other, "e")
        await eventually(
            lambda: (
                (info := cluster.state.log.infos.get(first)) is not None and info.url == other.url
            ),
            what="it is found there",
        )
        cluster.api.edit("Pod", "f", {"status": {"phase": "Failed"}})
        await cluster.until({first: "ready"})


async def test_a_server_with_two_ranks(cluster):
    async with EngineDouble(EngineDoubleConfig(dp_size=2)) as engine:
        uid = cluster.run_pod(engine)
        async with cluster.agent():
            await cluster.until({f"{uid}/dp0": "ready", f"{uid}/dp1": "ready"})
            cluster.api.terminate("e")
            await cluster.until({f"{uid}/dp0": "draining", f"{uid}/dp1": "draining"})
            cluster.api.delete("Pod", "e")
            await cluster.until({})


async def test_an_annotation_that_makes_no_sense_is_told_and_harms_nobody_else(cluster, engine):
    uid = cluster.run_pod(engine)
    cluster.run_pod(engine, "bad", annotations={"nearkv.io/port": "eighty"})
    async with cluster.agent():
        await cluster.until({uid: "ready"})
        problems = (await cluster.status())["problems"]
        assert "default/bad: annotation nearkv.io/port: 'eighty' is no port" in problems


async def test_configured_engines_and_pods_together(cluster, engine):
    async with EngineDouble(EngineDoubleConfig()) as other:
        uid = cluster.run_pod(engine)
        known = cluster.run_pod(other, "known")
        engines = [{"id": known, "url": other.url, "group": "mine"}]
        async with cluster.agent(engines=engines):
            await cluster.until({uid: "ready", known: "ready"})
            assert cluster.state.log.infos[known].group == "mine"
            cluster.api.delete("Pod", "known")
            cluster.api.delete("Pod", "e")
            await cluster.until({known: "ready"})


async def test_a_selector_makes_every_pod_it_finds_an_engine(cluster, engine):
    uid = cluster.run_pod(engine, labels={"app": "vllm"})
    cluster.run_pod(engine, "other", labels={"app": "web", "nearkv.io/group": "g"})
    chosen = {"kubeconfig": str(cluster.kubeconfig), "selector": "app=vllm", "namespace": "default"}
    async with cluster.agent(kubernetes=chosen):
        await cluster.until({uid: "ready"})
        cluster.api.edit("Pod", "e", {"metadata": {"labels": {"app": "none"}}})
        await cluster.until({})
        assert cluster.api.record.all("watch")[0].path == "/api/v1/namespaces/default/pods"


async def test_gpus_learn_uids_of_pods_and_follow_driver_upgrades(cluster, engine):
    uid = cluster.run_pod(engine)
    cluster.api.put(node_object("n1", labels={UPGRADE: "upgrade-done"}))
    cluster.api.put(node_object("n2", labels={UPGRADE: "pod-deletion-required"}))
    async with cluster.agent(gpu={"pod_resources_socket": None}):
        gpus = cluster.app[GPUS]
        await cluster.until({uid: "ready"})
        assert gpus.pod_uid_of(PodName("default", "e")) == uid
        assert gpus.pod_uid_of(PodName("default", "f")) is None
        assert gpus.watch.holds == ()
        cluster.api.edit("Node", "n1", {"metadata": {"labels": {UPGRADE: "drain-required"}}})
        await eventually(lambda: gpus.watch.holds, what="NVML is let go of")
        cluster.api.edit("Node", "n1", {"metadata": {"labels": {UPGRADE: "upgrade-done"}}})
        await eventually(lambda: not gpus.watch.holds, what="NVML is opened again")
        cluster.api.edit("Node", "n1", {"metadata": {"labels": {UPGRADE: "drain-required"}}})
        await eventually(lambda: gpus.watch.holds, what="NVML is let go of once more")
        cluster.api.delete("Node", "n1")
        await eventually(lambda: not gpus.watch.holds, what="no label holds it")


# -- WorkerStatus ----------------------------------------------------------------------------


def worker_status(cluster, name="e"):
    found = [each for each in cluster.api.all("WorkerStatus") if each["metadata"]["name"] == name]
    return found[0].get("status") if found else None


def condition(status, kind):
    return next(each["status"] for each in status["conditions"] if each["type"] == kind)


async def test_a_worker_status_that_the_extender_understands(cluster, engine):
    uid = cluster.run_pod(engine)
    async with cluster.agent():
        await cluster.until({uid: "ready"})
        await eventually(
            lambda: (said := worker_status(cluster)) and said.get("model") == "tiny",
            what="it is written",
        )
        status = worker_status(cluster)
        assert list(complaints(status, schema_of_status())) == []
        found = WorkerStatus(status=msgspec.Raw(msgspec.json.encode(status)))
        summary = read_status(found).summary
        assert (summary.node, summary.groups[0].group) == ("n1", "g")
        _, metrics = await cluster.get("/metrics")
        assert 'nearkv_agent_worker_status_writes_total{outcome="reported"}' in metrics
        assert "nearkv_agent_kubernetes_engines 1.0" in metrics


async def test_the_rights_that_the_agent_uses_are_those_that_are_documented(cluster, engine):
    cluster.run_pod(engine)
    cluster.api.put(node_object("n1"))
    async with cluster.agent(gpu={"pod_resources_socket": None}):
        await eventually(lambda: worker_status(cluster), what="it is written")
        await cluster.api.wait_for_watches(2)
    # The right to create is one that the API server asks for by itself, when it applies.
    assert cluster.api.record.rules == documented_rights() - {("create", "workerstatuses")}


async def test_worker_statuses_can_be_off(cluster, engine):
    uid = cluster.run_pod(engine)
    async with cluster.agent(worker_status={"enabled": "off"}):
        await cluster.until({uid: "ready"})
        assert (await cluster.status())["worker_status"]["enabled"] is False
        assert cluster.api.record.all("patch") == []


# -- The API server is away ------------------------------------------------------------------


async def test_while_the_api_server_is_away_state_is_served_and_writes_resume(cluster, engine):
    uid = cluster.run_pod(engine)
    async with cluster.agent():
        statuses = cluster.app[WORKER_STATUSES]
        clock = {"ahead": 0.0}
        statuses._now = lambda: cluster.state.now() + clock["ahead"]
        await cluster.until({uid: "ready"})
        await eventually(lambda: worker_status(cluster), what="it is written")
        async with following(cluster.url) as seen:
            cluster.api.kill()
            await eventually(
                lambda: cluster.app[KUBERNETES].failures["pods", "unreachable"],
                what="it is noticed",
            )
            # The engine goes and comes back meanwhile, and the state says so.
            engine.kill()
            await eventually(lambda: (uid, "unreachable") in seen, what="it is away")
            await engine.start()
            await cluster.until({uid: "ready"})
            # Five minutes, as the writer sees them.
            for _ in range(30):
                clock["ahead"] += 10.0
                await asyncio.sleep(0.06)
            assert cluster.engine_states() == {uid: "ready"}
            assert (await cluster.get("/readyz"))[0] == 200
            problems = (await cluster.status())["problems"]
            assert any(text.startswith("watching pods: ") for text in problems)
            cluster.api.record.clear()
            await cluster.api.start()
            cluster.api.delete("Pod", "e")
            await cluster.until({})
        uses = [seen.verb for seen in cluster.api.record.all(resource="pods")]
        assert uses.count("list") == 0, "a watch is resumed, not listed anew"
        assert len(cluster.api.record.all("patch")) <= 1


async def test_without_an_api_server_at_the_start_nothing_is_said_to_be_gone(cluster, engine):
    uid = cluster.run_pod(engine)
    cluster.api.inject(Faults(verbs=("list",), resources=("pods",), status=500))
    starting = cluster.agent(is_ready=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearkv.agent.kubernetes.service._FIRST_LOOK_SECONDS", 0.2)
        async with starting:
            for path in ("/v1/state", "/v1/state/stream", "/v1/summary"):
                assert (await cluster.get(path))[0] == 503
            assert (await cluster.get("/readyz"))[0] == 503
            assert (await cluster.status())["kubernetes"]["listed"] is False
            cluster.api.inject(Faults())
            await eventually(lambda: cluster.app[READINESS].is_ready, what="pods are listed")
            await cluster.until({uid: "ready"})
            assert (await cluster.get("/v1/state"))[0] == 200


async def test_a_connection_that_breaks_is_no_reason_for_a_list(cluster, engine):
    uid = cluster.run_pod(engine)
    async with cluster.agent():
        await cluster.until({uid: "ready"})
        await cluster.api.wait_for_watches()
        cluster.api.break_connections()
        await cluster.api.wait_until(lambda: cluster.api.open_watches == 0)
        await cluster.api.wait_for_watches()
        assert len(cluster.api.record.all("list", "pods")) == 1
        assert cluster.engine_states() == {uid: "ready"}


# -- The program -----------------------------------------------------------------------------


async def test_the_program_with_a_node_name_and_a_kubeconfig(cluster, engine, tmp_path):
    uid = cluster.run_pod(engine)
    config = tmp_path / "agent.json"
    config.write_text(
        json.dumps(
            {
                **FAST_AGENT,
                "gpu": {"enabled": "off"},
                "kubernetes": {"kubeconfig": str(cluster.kubeconfig)},
                "worker_status": AT_ONCE,
            }
        )
    )
    async with AsyncExitStack() as stack:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nearkv.agent", "--config", str(config)),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "NODE_NAME": "n1"},
        )

        async def end():
            if process.returncode is None:
                process.kill()
            await process.wait()
            process._transport.close()

        stack.push_async_callback(end)
        async with asyncio.timeout(30):
            while (line := json.loads(await process.stderr.readline()))["event"] != "listening":
                pass
        cluster.url = line["url"]
        await eventually(
            lambda: (said := worker_status(cluster)) and said["node"] == "n1", what="it is written"
        )
        (only,) = (await cluster.status())["engines"]
        assert only["id"] == uid
        process.terminate()
        assert await process.wait() == 0
