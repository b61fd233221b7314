"""The endpoint picker's life beside a real Envoy: killed, stopped, probed; who it may pick."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack

import aiohttp
import grpc
import pytest

from nearkv.ingress.extproc.health import CHECK, WATCH
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, pod_object
from tests.doubles.api_server.resources import PODS, Resource
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.extender.tls_files import HAS_OPENSSL, make_pair
from tests.integration.envoy_site import becomes, endpoint, example, ext_proc_of, running_envoy
from tests.integration.picker_process import ingress_program
from tests.integration.picker_site import gateway, running_picker
from tests.integration.stack import running_agent

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 12
POOLS = Resource("InferencePool", "inferencepools", "inference.networking.k8s.io")
BODY = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 2}


def small_double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=2048, **config))


# -- Killed and stopped ----------------------------------------------------------------


def picker_flags(agent_url, listen="127.0.0.1:0"):
    return (
        *("--mode", "ext-proc", "--listen", "127.0.0.1:0", "--ext-proc.listen", listen),
        *("--agents", agent_url, "--log-level", "info"),
    )


LISTENING = ("ext_proc_listening", "listening")


async def complete(session, envoy, **headers):
    url = envoy.url + "/v1/completions"
    async with session.post(url, json=BODY, headers=headers) as response:
        await response.read()
        return response


@pytest.mark.parametrize("fails", ["closed", "open"])
async def test_a_killed_picker_fails_as_configured_and_is_used_again_once_it_is_back(
    tmp_path, fails
):
    name = "envoy-original-dst.yaml" if fails == "closed" else "envoy-override-host.yaml"
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(small_double())
        agent = await stack.enter_async_context(running_agent(a))
        first = await stack.enter_async_context(
            ingress_program(*picker_flags(agent.url), listening=LISTENING)
        )
        address = first.told["ext_proc_listening"]
        config = example(
            name, picker=address, engines=() if fails == "closed" else [endpoint(a.url)]
        )
        envoy = await stack.enter_async_context(running_envoy(config, tmp_path))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        response = await complete(session, envoy)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "a")
        first.kill()
        await first.ended()
        await eventually_unhealthy(session, envoy)
        for _ in range(5):
            response = await complete(session, envoy)
            assert response.status == (503 if fails == "closed" else 200)
            assert "x-nearkv-engine" not in response.headers
        flags = picker_flags(agent.url, address)
        await stack.enter_async_context(ingress_program(*flags, listening=LISTENING))
        await eventually_picked(session, envoy)


async def eventually_unhealthy(session, envoy):
    async def is_unhealthy():
        return await envoy.stat(session, "cluster.picker.membership_healthy") == 0

    await becomes(is_unhealthy, what="Envoy knows that its picker is away")


async def eventually_picked(session, envoy):
    async def is_picked():
        response = await complete(session, envoy)
        return response.headers.get("x-nearkv-engine") == "a" and response.status == 200

    await becomes(is_picked, what="requests are picked for again")


async def has_sent_more(session, envoy, *, messages):
    return await envoy.stat(session, "ext_proc.stream_msgs_sent") > messages


@pytest.mark.parametrize(
    "name", ["envoy-original-dst.yaml", "envoy-override-host.yaml"], ids=["closed", "open"]
)
async def test_a_request_in_the_hands_of_a_picker_that_is_killed_gets_a_clear_error(tmp_path, name):
    """Its body is with the picker, so Envoy cannot go on by itself, whatever is configured."""
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(small_double())
        agent = await stack.enter_async_context(running_agent(a))
        program = await stack.enter_async_context(
            ingress_program(*picker_flags(agent.url), listening=LISTENING)
        )
        engines = [endpoint(a.url)] if "override" in name else []
        config = example(name, picker=program.told["ext_proc_listening"], engines=engines)
        envoy = await stack.enter_async_context(running_envoy(config, tmp_path))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        assert (await complete(session, envoy)).status == 200
        program.process.send_signal(signal.SIGSTOP)
        sent = await envoy.stat(session, "ext_proc.stream_msgs_sent")
        waiting = asyncio.create_task(complete(session, envoy))
        await becomes(
            lambda: has_sent_more(session, envoy, messages=sent + 1),
            what="the request is on its way",
        )
        program.kill()
        response = await waiting
        assert response.status == 503
        assert a.record.counts["/v1/completions"] == 1


async def test_a_picker_that_is_told_to_stop_lets_its_streams_end(tmp_path):
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(small_double(decode_seconds_per_token=0.02))
        agent = await stack.enter_async_context(running_agent(a))
        program = await stack.enter_async_context(
            ingress_program(*picker_flags(agent.url), listening=LISTENING)
        )
        address = program.told["ext_proc_listening"]
        config = example("envoy-original-dst.yaml", picker=address)
        envoy = await stack.enter_async_context(running_envoy(config, tmp_path))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        body = BODY | {"max_tokens": 30, "stream": True}
        async with session.post(envoy.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            program.stop()
            async with grpc.aio.insecure_channel(address) as channel:
                watch = channel.unary_stream(WATCH)(b"\x0a\x09readiness")
                async for status in watch:
                    if status == b"\x08\x02":
                        break
            rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await program.ended() == 0


# -- Health ----------------------------------------------------------------------------


async def test_probes_by_grpc_with_the_names_of_the_protocol():
    async with running_picker(ext_proc={"health_listen": "127.0.0.1:0"}) as picker:
        for address in (picker.address, picker.health):
            async with grpc.aio.insecure_channel(address) as channel:
                check = channel.unary_unary(CHECK)
                for name in (b"", b"liveness", b"envoy.service.ext_proc.v3.ExternalProcessor"):
                    question = b"\x0a" + bytes([len(name)]) + name if name else b""
                    await eventually_serving(check, question)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await check(b"\x0a\x04nope")
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def eventually_serving(check, question):
    async def is_serving():
        return await check(question) == b"\x08\x01"

    await becomes(is_serving, what="the probe says so")


async def test_what_is_no_message_ends_the_stream_and_is_counted():
    async with (
        running_picker() as picker,
        grpc.aio.insecure_channel(picker.address) as channel,
    ):
        process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        call = process()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await picker.is_idle()
        assert (await picker.counts("ext_proc_streams"))[("unreadable",)] == 1


@pytest.mark.skipif(not HAS_OPENSSL, reason="the openssl program makes the certificates")
async def test_tls_with_a_certificate_that_is_renewed_while_it_is_in_use(tmp_path):
    old, new = make_pair(tmp_path, "old"), make_pair(tmp_path, "new")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old.copy_to(cert, key)
    tls = {"cert": cert, "key": key}
    async with running_picker(ext_proc={"tls": tls}) as picker:
        assert await says_it_is_live(picker.address, trusting=old)
        assert not await says_it_is_live(picker.address, trusting=new)
        new.copy_to(cert, key)
        assert await says_it_is_live(picker.address, trusting=new)
        cert.write_bytes(b"half writ")
        assert await says_it_is_live(picker.address, trusting=new)


async def says_it_is_live(address, *, trusting):
    credentials = grpc.ssl_channel_credentials(trusting.cert.read_bytes())
    async with grpc.aio.secure_channel(address, credentials) as channel:
        try:
            return await channel.unary_unary(CHECK)(b"\x0a\x08liveness") == b"\x08\x01"
        except grpc.aio.AioRpcError:
            return False


# -- Who may be picked -----------------------------------------------------------------


def with_subset(config, *endpoints):
    """Have Envoy restrict the pick, as gateways with subsets do."""
    listener = config["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    key = "x-gateway-destination-endpoint-subset"
    kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
    manager["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": kind,
                "metadata": [
                    {"metadata_namespace": "envoy.lb.subset_hint", "value": {key: list(endpoints)}}
                ],
            },
        },
    )
    return config


async def test_a_subset_of_the_gateway_is_kept_to(tmp_path):
    async with (
        small_double() as a,
        small_double() as b,
        running_agent(a, b) as agent,
        running_picker(agent.url) as picker,
    ):
        for subset, expected in (
            ([endpoint(b.url)], (200, "b")),
            (["127.0.0.9", endpoint(a.url)], (200, "a")),
            (["10.9.9.9:1"], (503, "none")),
        ):
            config = example("envoy-original-dst.yaml", picker=picker.address)
            async with gateway(picker, tmp_path, with_subset(config, *subset)) as entry:
                for _ in range(3):
                    response, _ = await entry.complete(DOCUMENT)
                    assert (response.status, response.headers["x-nearkv-engine"]) == expected


def pool_object(port, **labels):
    return {
        "apiVersion": POOLS.api_version,
        "kind": "InferencePool",
        "metadata": {"name": "pool", "namespace": "default"},
        "spec": {
            "selector": {"matchLabels": labels or {"app": "vllm"}},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": "nearkv-ingress", "port": {"number": 9002}},
        },
    }


def member(name, ip, **labels):
    return pod_object(name, node="n1", pod_ip=ip, labels=labels or {"app": "vllm"})


async def test_the_pool_says_who_may_be_picked_and_changes_at_once(tmp_path):
    api_config = ApiServerConfig(resources=(PODS, POOLS), bookmark_seconds=0.2)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiServerDouble(api_config))
        a = await stack.enter_async_context(small_double(host="127.0.0.2"))
        port = int(a.url.rpartition(":")[2])
        b = await stack.enter_async_context(small_double(host="127.0.0.3", port=port))
        agent = await stack.enter_async_context(running_agent(a, b))
        pool = {"name": "pool", "api_server": api.url}
        picker = await stack.enter_async_context(running_picker(agent.url, ext_proc={"pool": pool}))
        entry = await stack.enter_async_context(gateway(picker, tmp_path, health(picker)))

        async def served_by(*names):
            async with asyncio.timeout(30):
                seen = []
                while True:
                    response, _ = await entry.complete(f"{len(seen)} {DOCUMENT}")
                    seen.append(response.headers["x-nearkv-engine"])
                    if set(seen[-6:]) == set(names) and len(seen) >= 6:
                        return

        await served_by("none")  # no pool yet: nobody
        api.put(member("pod-a", "127.0.0.2"))
        api.put(member("pod-b", "127.0.0.3", app="other"))
        api.put(pool_object(port))
        await served_by("a")
        api.put(member("pod-b", "127.0.0.3"))
        await served_by("a", "b")
        api.terminate("pod-a")
        await served_by("b")
        api.put(pool_object(port, app="nothing"))
        await served_by("none")
        api.put(pool_object(port))
        await served_by("b")
        api.delete("InferencePool", "pool")
        await served_by("none")


def health(picker):
    """Envoy's configuration without health checks: the picker is not ready before its pool."""
    config = example("envoy-original-dst.yaml", picker=picker.address)
    for cluster in config["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)
    return config


async def test_members_that_no_agent_knows_are_used_by_load_alone(tmp_path):
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            ApiServerDouble(ApiServerConfig(resources=(PODS, POOLS)))
        )
        a = await stack.enter_async_context(small_double(host="127.0.0.2"))
        port = int(a.url.rpartition(":")[2])
        b = await stack.enter_async_context(small_double(host="127.0.0.3", port=port))
        api.put_all([member("pod-a", "127.0.0.2"), member("pod-b", "127.0.0.3")])
        api.put(pool_object(port))
        picker = await stack.enter_async_context(
            running_picker(ext_proc={"pool": {"name": "pool", "api_server": api.url}})
        )
        entry = await stack.enter_async_context(gateway(picker, tmp_path))
        answers = [await entry.complete(DOCUMENT) for _ in range(8)]
        assert {response.headers["x-nearkv-engine"] for response, _ in answers} == {
            "pod-a",
            "pod-b",
        }
        assert a.record.counts["/v1/completions"] > 0 < b.record.counts["/v1/completions"]
        await picker.is_idle()


async def test_trailers_of_the_request_pass(tmp_path):
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
    ):
        config = example("envoy-original-dst.yaml", picker=picker.address)
        listener = config["static_resources"]["listeners"][0]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_protocol_options"] = {"enable_trailers": True}
        async with gateway(picker, tmp_path, config) as entry:
            host, _, port = endpoint(entry.envoy.url).partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps(BODY).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"%x\r\n%s\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(body), body)
            )
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.startswith(b"HTTP/1.1 200 ")
            writer.close()
            await writer.wait_closed()
            (received,) = [r for r in a.record if r.path == "/v1/completions"]
            assert received.body == body
            await picker.is_idle()
            assert ext_proc_of(config)["processing_mode"]["request_trailer_mode"] == "SEND"
