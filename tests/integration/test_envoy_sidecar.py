"""Prefill and decode on two engines through Envoy: picker, sidecar and engines together."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from nearkv.serving import running
from nearkv.settings import Address
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, pod_object
from tests.doubles.api_server.resources import PODS, Resource
from tests.doubles.engine import EngineDouble, Faults
from tests.integration.pd_stack import LEASE_KEYS, Part, Relay, pd_double
from tests.integration.picker_process import ingress_program
from tests.integration.picker_site import Gateway, gateway, running_picker
from tests.integration.sidecar_site import RunningSidecar, running_sidecar
from tests.integration.stack import ANY_PORT, eventually, running_agent

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 30
POOLS = Resource("InferencePool", "inferencepools", "inference.networking.k8s.io")
PARTS = {"p": Part("prefill"), "d": Part("decode")}


@dataclass(slots=True)
class Site:
    """Two pods on addresses of their own: P's engine on the serving port, D's behind a sidecar."""

    entry: Gateway
    sidecar: RunningSidecar
    p: EngineDouble
    d: EngineDouble

    def legs(self, engine):
        return [r.as_json() for r in engine.record if r.path.endswith("completions")]


def pool_object(port):
    return {
        "apiVersion": POOLS.api_version,
        "kind": "InferencePool",
        "metadata": {"name": "pool", "namespace": "default"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": port}],
        },
    }


@asynccontextmanager
async def site(folder, **settings) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        p = await enter(pd_double(host="127.0.0.2"))
        d = await enter(pd_double(host="127.0.0.3"))
        serving_port = int(p.url.rpartition(":")[2])
        api = await enter(ApiServerDouble(ApiServerConfig(resources=(PODS, POOLS))))
        for name, ip in (("pod-p", "127.0.0.2"), ("pod-d", "127.0.0.3")):
            api.put(pod_object(name, node="n1", pod_ip=ip, labels={"app": "vllm"}))
        api.put(pool_object(serving_port))
        pool = {"name": "pool", "api_server": api.url}
        sidecar = await enter(
            running_sidecar(
                d.url, address=Address("127.0.0.3", serving_port), sidecar={"pool": pool}
            )
        )
        agent = await enter(running_agent(p, d, names=("p", "d")))
        relay = Relay(agent.url, PARTS)
        app = web.Application()
        app.router.add_get("/v1/state/stream", relay.stream)
        relay.url = (await enter(running(app, ANY_PORT))).url
        pd = {"mode": "always", "min_tokens": 1}
        picker = await enter(running_picker(relay.url, pd=pd, ext_proc={"pool": pool}, **settings))
        entry = await enter(gateway(picker, folder))
        yield Site(entry, sidecar, p, d)


async def test_the_picker_sends_to_the_sidecar_and_names_the_prefiller(tmp_path):
    async with site(tmp_path) as it:
        response, answer = await it.entry.complete(DOCUMENT)
        assert response.status == 200
        assert response.headers["x-nearkv-engine"] == "d"
        assert response.headers["x-nearkv-prefill-engine"] == "p"
        assert response.headers["x-nearkv-prefill"] == "ok"
        (prefill,), (decode,) = it.legs(it.p), it.legs(it.d)
        assert prefill["body"]["max_tokens"] == 1
        assert decode["body"]["kv_transfer_params"].items() >= LEASE_KEYS.items()
        assert prefill["headers"]["x-request-id"] == decode["headers"]["x-request-id"]
        details = json.loads(answer)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > 0
        await it.entry.picker.is_idle()
        assert await it.entry.picker.counts("ext_proc_picks") == {("split",): 1}
        know = it.entry.picker.knowledge
        assert know.computing.at("p", "") == know.staged.at("d", "") == 0


async def test_when_the_prefiller_fails_the_decode_engine_answers_alone(tmp_path):
    async with site(tmp_path) as it:
        await it.p.inject(Faults(answer_status=500, paths=("/v1/completions",)))
        response, answer = await it.entry.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-prefill"]) == (200, "failed")
        assert response.headers["x-nearkv-reason"] == "no_kv"
        assert "x-nearkv-prefill-engine" not in response.headers
        know = it.entry.picker.knowledge
        source = know.fleet.engines["p"].info
        assert know.suspects.is_suspect("p", source.incarnation, time.monotonic())
        (decode,) = it.legs(it.d)
        assert "kv_transfer_params" not in decode["body"]
        assert json.loads(answer)["choices"][0]["text"]
        await it.entry.picker.is_idle()


async def test_a_prefiller_that_a_client_names_is_not_asked(tmp_path):
    async with site(tmp_path, policy="round-robin") as it:
        forged = {"x-prefiller-host-port": "127.0.0.2:1"}
        response, _ = await it.entry.complete(DOCUMENT, headers=forged)
        assert response.status == 200
        for leg in (*it.legs(it.p), *it.legs(it.d)):
            assert "x-prefiller-host-port" not in leg["headers"]
        assert response.headers.get("x-nearkv-prefill") in (None, "ok")


async def test_a_streamed_answer_of_two_engines_passes_whole(tmp_path):
    async with site(tmp_path) as it:
        usage = {"include_usage": True}
        response, answer = await it.entry.complete(DOCUMENT, stream=True, stream_options=usage)
        assert response.status == 200
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b'"cached_tokens":0' not in answer
        await it.entry.picker.is_idle()


async def test_the_sidecar_as_a_program_serves_and_stops():
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(pd_double())
        d = await stack.enter_async_context(pd_double())
        flags = (
            *("--mode", "sidecar", "--listen", "127.0.0.1:0"),
            *("--sidecar.listen", "127.0.0.1:0", "--sidecar.engine", d.url),
            *("--sidecar.prefillers", "127.0.0.0/8"),
        )
        listening = ("listening", "probes_listening")
        program = await stack.enter_async_context(ingress_program(*flags, listening=listening))
        url = f"http://{program.told['listening']}"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 2}
        headers = {"x-prefiller-host-port": p.url.removeprefix("http://")}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            assert (response.status, response.headers["x-nearkv-prefill"]) == (200, "ok")
        probes = program.told["probes_listening"]
        async with session.get(f"http://{probes}/readyz") as response:
            assert response.status == 200
        program.stop()
        assert await program.ended() == 0
        await eventually(lambda: p.record.counts["/v1/completions"] == 1, what="P was asked once")
