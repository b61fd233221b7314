"""The double sends the bytes that a real kube-scheduler sent, and reads JSON as Go does."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.doubles.scheduler.clocks import HandClock
from tests.doubles.scheduler.extender_client import (
    Victims,
    encode_args,
    encode_binding,
    encode_preemption,
)
from tests.doubles.scheduler.go_http import GoHttpClient
from tests.doubles.scheduler.go_json import GoJsonError, decode, encode, read_int64, read_struct
from tests.doubles.scheduler.objects import NodeInfo, PodInfo

SAMPLES = Path(__file__).parents[1] / "data" / "kube-scheduler"
VERBS = ["filter", "prioritize"]


def captured(name):
    body = (SAMPLES / f"{name}.body.json").read_bytes()
    return body, json.loads(body)


def shuffled(value, seed=7):
    """Return the same JSON with keys in another order, as an API server might hand it out."""
    if isinstance(value, dict):
        # fieldsV1 is passed on as it came.
        items = [
            (key, item if key == "fieldsV1" else shuffled(item, seed))
            for key, item in value.items()
        ]
        random.Random(seed).shuffle(items)
        return dict(items)
    return [shuffled(item, seed) for item in value] if isinstance(value, list) else value


def as_api_server_gives(document):
    """Return an object with what the scheduler takes out again."""
    given = shuffled(document)
    return {"apiVersion": "v1", "kind": "Pod", **given}


@pytest.mark.parametrize("verb", VERBS)
def test_names_are_sent_as_captured(verb):
    body, document = captured(f"{verb}_nodeCacheCapable_true")
    nodes = [NodeInfo({"metadata": {"name": name}}) for name in document["NodeNames"]]
    pod = PodInfo(as_api_server_gives(document["Pod"]))
    assert encode_args(pod, nodes, names_only=True) == body


@pytest.mark.parametrize("verb", VERBS)
def test_whole_nodes_are_sent_as_captured(verb):
    body, document = captured(f"{verb}_nodeCacheCapable_false")
    nodes = [NodeInfo(as_api_server_gives(item)) for item in document["Nodes"]["items"]]
    for node in nodes:
        # What a struct writes even when empty need not be in what the API server gave.
        del node.document["status"]["daemonEndpoints"], node.document["status"]["nodeInfo"]
    pod = PodInfo(as_api_server_gives(document["Pod"]))
    assert encode_args(pod, nodes, names_only=False) == body


def test_managed_fields_are_stripped_from_the_pod_but_not_from_nodes():
    _, document = captured("filter_nodeCacheCapable_false")
    document["Pod"]["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    nodes = [NodeInfo(document["Nodes"]["items"][0])]
    sent = json.loads(encode_args(PodInfo(document["Pod"]), nodes, names_only=False))
    assert "managedFields" not in sent["Pod"]["metadata"]
    assert "managedFields" in sent["Nodes"]["items"][0]["metadata"]


@pytest.mark.parametrize("by_uid", [True, False], ids=["uids", "pods"])
def test_preemption_is_sent_as_captured(by_uid):
    body, document = captured(f"preempt_nodeCacheCapable_{str(by_uid).lower()}")
    key = "NodeNameToMetaVictims" if by_uid else "NodeNameToVictims"
    victims = {
        name: Victims(
            [
                PodInfo({"metadata": {"uid": pod["UID"]}} if by_uid else as_api_server_gives(pod))
                for pod in entry["Pods"]
            ],
            entry["NumPDBViolations"],
        )
        for name, entry in reversed(document[key].items())
    }
    pod = PodInfo(as_api_server_gives(document["Pod"]))
    assert encode_preemption(pod, victims, by_uid=by_uid) == body


def test_binding_is_sent_as_captured():
    body, document = captured("bind")
    metadata = {"name": document["PodName"], "namespace": "default", "uid": document["PodUID"]}
    assert encode_binding(PodInfo({"metadata": metadata}), document["Node"]) == body


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("mode", ["true", "false"])
async def test_headers_are_sent_as_captured(verb, mode):
    name = f"{verb}_nodeCacheCapable_{mode}"
    body, _ = captured(name)
    wanted = json.loads((SAMPLES / f"{name}.headers.json").read_text())
    received = bytearray()

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        received.extend(head + await reader.readexactly(len(body)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = GoHttpClient(5.0, HandClock())
        reply = await client.post(f"http://127.0.0.1:{port}/{verb}", body)
        client.close()
    wanted["headers"]["Host"] = f"127.0.0.1:{port}"
    lines = [wanted["request_line"], *(f"{k}: {v}" for k, v in wanted["headers"].items())]
    assert received == "\r\n".join([*lines, "", ""]).encode() + body
    assert (reply.status, reply.body) == (200, b"[]")


def test_text_is_escaped_as_go_does():
    separators = chr(0x2028) + chr(0x2029)
    sent = encode({"a": "<&>ü\t" + separators})
    assert sent == '{"a":"\\u003c\\u0026\\u003eü\\t\\u2028\\u2029"}'.encode()


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"{", b"nope", b"NaN", b'{"a":Infinity}', b"<html>", b"\xef\xbb\xbf{}"],
    ids=["empty", "blank", "cut", "word", "NaN", "Infinity", "html", "byte-order mark"],
)
def test_what_go_does_not_take_for_json(body):
    with pytest.raises(GoJsonError):
        decode(body)


@pytest.mark.parametrize("body", [b"7.0", b"1e1", b'"7"', b"9223372036854775808", b"true"])
def test_what_go_does_not_take_for_an_integer(body):
    with pytest.raises(GoJsonError):
        read_int64(decode(body))


def test_keys_match_without_case_the_last_wins_and_null_changes_nothing():
    fields = {"Host": str, "Score": read_int64}
    read = read_struct(
        decode(b'{"HOST":"a","score":1,"Score":2,"sCORE":null,"x":[]} x'), fields, ""
    )
    assert read == {"Host": "a", "Score": 2}
