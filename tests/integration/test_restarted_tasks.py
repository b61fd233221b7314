"""Tasks of the programs that fail once and are begun anew: what they do is as good as before."""

import asyncio

from nearkv.agent.app import READINESS
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.kubernetes.joining import KUBERNETES
from nearkv.agent.settings import AgentSettings
from nearkv.extender.app import KubernetesView
from nearkv.extender.view.cluster import ClusterView, ViewConfig, levels_reader
from nearkv.extender.view.nodes import NodeRules
from nearkv.extender.view.state import ClusterState
from nearkv.health import Readiness
from nearkv.ingress.extproc.pool_watching import PoolWatch
from nearkv.kube.access import ApiAccess
from nearkv.serving import running
from nearkv.supervising import Job, supervised
from tests.agent.kubernetes.things import engine_pod
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, node_object
from tests.extender.view.test_state import Told
from tests.extender.view.things import LEVELS
from tests.ingress.extproc.test_pool_watching import POOLS, member, pool_object
from tests.integration.stack import ANY_PORT, FAST_AGENT, eventually


def fails_once(monkeypatch, owner, name):
    """Have a method raise at its next call; returns the list of its calls."""
    method, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


async def test_the_agent_goes_on_following_pods(tmp_path, monkeypatch):
    async with ApiServerDouble() as api:
        settings = {
            **FAST_AGENT,
            "node": "n1",
            "gpu": {"enabled": "off"},
            "links": {"enabled": False},
            "worker_status": {"enabled": "off"},
            "kubernetes": {"kubeconfig": str(api.write_kubeconfig(tmp_path / "kubeconfig"))},
        }
        app = build_agent(AgentSettings.model_validate(settings))
        async with running(app, ANY_PORT):
            readiness, kubernetes = app[READINESS], app[KUBERNETES]
            await eventually(lambda: readiness.is_ready, what="the agent is ready")
            await api.wait_for_watches()
            fails_once(monkeypatch, kubernetes.roster, "put")
            # The event of this pod is lost with the task that took it.
            api.put(engine_pod("e", ip="127.0.0.1"))
            await eventually(lambda: readiness.task_failures["pods_watch"], what="it failed")
            assert readiness.is_ready
            await eventually(lambda: len(kubernetes.engines) == 1, what="the pod is followed")
            assert readiness.is_ready


async def test_the_extender_goes_on_following_the_cluster(monkeypatch):
    """Its view opens its own access, which was closed when it failed."""
    async with ApiServerDouble() as api:
        api.put(node_object("n1"))
        access = ApiAccess.plain(api.url)
        config = ViewConfig(
            levels=LEVELS,
            nodes=NodeRules(levels_of=levels_reader(LEVELS)),
            publish_seconds=0.01,
            sweep_seconds=0.02,
        )
        view = KubernetesView(ClusterView(access, config, Told()), access)
        readiness = Readiness()
        async with supervised([Job("view", view.run)], readiness, check="view"):
            await asyncio.wait_for(view.wait_until_synced(), 30)
            fails_once(monkeypatch, ClusterState, "sweep")
            await eventually(lambda: readiness.task_failures["view"], what="it failed")
            api.put(node_object("n2"))
            await eventually(lambda: "n2" in view.snapshot().rows, what="a new node is known")
            assert readiness.is_ready


async def test_the_picker_goes_on_following_its_pool(monkeypatch):
    kinds = (*ApiServerConfig().resources, POOLS)
    async with ApiServerDouble(ApiServerConfig(resources=kinds)) as api:
        api.put(pool_object())
        api.put(member(1))
        async with ApiAccess.plain(api.url) as access:
            watch = PoolWatch(
                access, name="pool", namespace="default", count_failure=lambda _: None
            )
            readiness = Readiness()
            job = Job("pool_watch", watch.run)
            async with supervised([job], readiness, check="pool_watch"):
                await eventually(
                    lambda: len(watch.membership().endpoints()) == 1, what="there is a member"
                )
                await api.wait_for_watches(2)
                fails_once(monkeypatch, watch, "_take_pool")
                api.edit("InferencePool", "pool", {"metadata": {"labels": {"a": "b"}}})
                await eventually(lambda: readiness.task_failures["pool_watch"], what="it failed")
                api.put(member(2))
                await eventually(
                    lambda: len(watch.membership().endpoints()) == 2, what="it follows"
                )
                assert readiness.is_ready
