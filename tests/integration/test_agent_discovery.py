"""An ingress that finds its agents in Kubernetes: real agents, an API server with troubles."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, Faults
from tests.doubles.api_server.resources import Resource
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.envoy_site import becomes
from tests.integration.stack import (
    DEADLINE_SECONDS,
    eventually,
    running_agent,
    running_ingress,
)

SLICES = Resource("EndpointSlice", "endpointslices", "discovery.k8s.io")
PROMPT = "the same words again and again " * 8


def slice_object(url, *, uid, service="nearkv-agent"):
    """Return a slice with one agent, as each of them has a port of its own here."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"nearkv-agent-{uid}",
            "namespace": "nearkv",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [host], "targetRef": {"kind": "Pod", "uid": uid}}],
        "ports": [{"name": "state", "port": int(port), "protocol": "TCP"}],
    }


class Cluster:
    """An API server that lists agents."""

    def __init__(self, api):
        self.api = api

    def put(self, agent, uid):
        self.api.put(slice_object(getattr(agent, "url", agent), uid=uid))

    def remove(self, uid):
        self.api.delete("EndpointSlice", f"nearkv-agent-{uid}", namespace="nearkv")

    def settings(self, **more):
        service = {"name": "nearkv-agent", "namespace": "nearkv", "api_server": self.api.url}
        return {"agent_service": service | more}


@pytest.fixture
async def cluster():
    async with ApiServerDouble(ApiServerConfig(resources=(SLICES,))) as api:
        yield Cluster(api)


@asynccontextmanager
async def agent_over(engine, node, *, host="127.0.0.1"):
    async with running_agent(engine, node=node, names=(node,), listen=f"{host}:0") as agent:
        yield agent


async def knows(ingress, *agents):
    """Wait until these agents, and no others, are known and in step."""
    urls = {agent.url for agent in agents}
    fleet = ingress.knowledge.fleet
    await eventually(
        lambda: fleet.agents.keys() == urls and all(a.synced for a in fleet.agents.values()),
        what=f"the agents are {urls}",
    )


async def answers(ingress):
    response, _ = await ingress.complete(PROMPT)
    return response.status


async def readiness(ingress):
    async with ingress.session.get(ingress.url + "/readyz") as answer:
        return answer.status, await answer.text()


async def is_ready(ingress):
    return (await readiness(ingress))[0] == 200


async def series(ingress, start):
    async with ingress.session.get(ingress.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


async def counted(ingress, start):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await series(ingress, start) < 1:  # noqa: ASYNC110 (it is read by HTTP)
            await asyncio.sleep(0.01)


async def test_agents_that_come_and_go_are_followed(cluster):
    async with (
        EngineDouble(EngineDoubleConfig()) as one,
        EngineDouble(EngineDoubleConfig()) as two,
        agent_over(one, "n1") as first,
        agent_over(two, "n2") as second,
    ):
        cluster.put(first, "a")
        async with running_ingress(**cluster.settings(keep_seconds=0.0)) as ingress:
            await knows(ingress, first)
            assert ingress.knowledge.fleet.engines.keys() == {"n1"}
            cluster.put(second, "b")
            await knows(ingress, first, second)
            assert ingress.knowledge.fleet.engines.keys() == {"n1", "n2"}
            assert await answers(ingress) == 200
            cluster.remove("a")
            await knows(ingress, second)
            assert ingress.knowledge.fleet.engines.keys() == {"n2"}
            assert await answers(ingress) == 200
            assert await series(ingress, "nearkv_ingress_agents ") == 1


async def test_an_agent_replaced_at_another_address_takes_its_engines_over(cluster):
    async with EngineDouble(EngineDoubleConfig()) as engine:
        async with agent_over(engine, "n1") as old:
            cluster.put(old, "a")
            ingress_running = running_ingress(**cluster.settings())
            ingress = await ingress_running.__aenter__()
            await knows(ingress, old)
            cluster.remove("a")
            fleet = ingress.knowledge.fleet
            await eventually(lambda: not fleet.agents[old.url].listed, what="it is not followed")
        try:
            # Its pod is gone, the next one is not there: the engine serves on.
            assert fleet.engines.keys() == {"n1"}
            assert not fleet.agents[old.url].connected
            assert await answers(ingress) == 200
            async with agent_over(engine, "n1", host="127.0.0.2") as new:
                cluster.put(new, "b")
                await knows(ingress, new)
                assert fleet.engines["n1"].agent == new.url
                assert await answers(ingress) == 200
        finally:
            await ingress_running.__aexit__(None, None, None)


async def test_what_is_known_stays_while_the_api_server_is_away(cluster):
    async with (
        EngineDouble(EngineDoubleConfig()) as one,
        EngineDouble(EngineDoubleConfig()) as two,
        agent_over(one, "n1") as first,
        agent_over(two, "n2") as second,
    ):
        cluster.put(first, "a")
        async with running_ingress(**cluster.settings()) as ingress:
            await knows(ingress, first)
            await becomes(lambda: is_ready(ingress), what="ready")
            await cluster.api.stop()
            cluster.put(second, "b")
            failures = 'nearkv_ingress_agent_list_failures_total{reason="unreachable"}'
            await counted(ingress, failures)
            assert await answers(ingress) == 200
            await knows(ingress, first)
            assert (await readiness(ingress))[0] == 200
            await cluster.api.start()
            await knows(ingress, first, second)


async def test_an_error_is_not_an_empty_list(cluster):
    async with EngineDouble(EngineDoubleConfig()) as engine, agent_over(engine, "n1") as agent:
        cluster.put(agent, "a")
        async with running_ingress(**cluster.settings(keep_seconds=0.0)) as ingress:
            await knows(ingress, agent)
            cluster.api.inject(Faults(status=403, times=3))
            cluster.api.break_connections()
            failures = 'nearkv_ingress_agent_list_failures_total{reason="forbidden"}'
            await counted(ingress, failures)
            await knows(ingress, agent)


async def test_other_services_are_not_followed(cluster):
    other = slice_object("http://127.0.0.1:9", uid="x", service="somebody-else")
    cluster.api.put(other)
    async with EngineDouble(EngineDoubleConfig()) as engine, agent_over(engine, "n1") as agent:
        cluster.put(agent, "a")
        async with running_ingress(**cluster.settings()) as ingress:
            await knows(ingress, agent)


async def test_without_agents_it_is_ready_after_a_while_and_follows_the_first(cluster):
    deadlines = {"sync_seconds": 0.3}
    async with running_ingress(**cluster.settings(), deadlines=deadlines) as ingress:
        said = await becomes_ready(ingress)
        assert said <= {
            "failed: agents_synced (the agents were not listed yet)",
            "failed: agents_synced (waiting for a first agent)",
        }
        async with EngineDouble(EngineDoubleConfig()) as engine, agent_over(engine, "n1") as agent:
            cluster.put(agent, "a")
            await knows(ingress, agent)
            assert await answers(ingress) == 200


async def becomes_ready(ingress):
    """Wait until it is; return what was said before."""
    said = set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (found := await readiness(ingress))[0] != 200:
            said.add(found[1])
            await asyncio.sleep(0.01)
    return said


async def test_agents_that_never_answer_are_waited_for_only_so_long(cluster):
    cluster.put("http://127.0.0.1:9", "dead")
    async with EngineDouble(EngineDoubleConfig()) as engine, agent_over(engine, "n1") as agent:
        cluster.put(agent, "a")
        deadlines = {"sync_seconds": 2.0}
        async with running_ingress(**cluster.settings(), deadlines=deadlines) as ingress:
            said = await becomes_ready(ingress)
            assert any("waiting for http://127.0.0.1:9" in each for each in said)
            assert await answers(ingress) == 200
            assert await series(ingress, "nearkv_ingress_agents ") == 2


async def test_without_an_api_server_it_waits_unless_it_knows_engines(cluster):
    async with EngineDouble(EngineDoubleConfig()) as engine, agent_over(engine, "n1") as agent:
        cluster.put(agent, "a")
        await cluster.api.stop()
        deadlines = {"sync_seconds": 0.05}
        engines = [{"id": "static", "url": engine.url}]
        async with (
            running_ingress(**cluster.settings(), deadlines=deadlines, engines=engines) as serving,
            running_ingress(**cluster.settings(), deadlines=deadlines) as waiting,
        ):
            await becomes_ready(serving)
            assert await answers(serving) == 200
            status, why = await readiness(waiting)
            assert status == 503
            assert "the agents were not listed yet" in why
            await cluster.api.start()
            await becomes_ready(waiting)
            await knows(waiting, agent)


async def test_configured_agents_are_followed_beside_those_found(cluster):
    async with (
        EngineDouble(EngineDoubleConfig()) as one,
        EngineDouble(EngineDoubleConfig()) as two,
        agent_over(one, "n1") as found,
        agent_over(two, "n2") as configured,
    ):
        cluster.put(found, "a")
        async with running_ingress(configured.url, **cluster.settings()) as ingress:
            await knows(ingress, found, configured)
            cluster.remove("a")
            fleet = ingress.knowledge.fleet
            await eventually(lambda: not fleet.agents[found.url].listed, what="it is left")
            assert fleet.agents[configured.url].connected


async def test_a_configured_engine_is_a_fallback_again_when_its_agent_is_forgotten(cluster):
    async with EngineDouble(EngineDoubleConfig()) as engine, agent_over(engine, "n1") as agent:
        cluster.put(agent, "a")
        engines = [{"id": "static", "url": engine.url}]
        settings = cluster.settings(keep_seconds=0.0)
        async with running_ingress(**settings, engines=engines) as ingress:
            fleet = ingress.knowledge.fleet
            await eventually(lambda: fleet.engines.keys() == {"n1"}, what="the agent speaks for it")
            cluster.remove("a")
            await eventually(lambda: fleet.engines.keys() == {"static"}, what="it is a fallback")
            assert await answers(ingress) == 200
