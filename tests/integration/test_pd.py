"""Prefill on one engine, decode on another, over real sockets."""

import json

import pytest

from nearkv.state.model import PathReading, TransferInfo
from tests.doubles.engine import Faults
from tests.integration.pd_stack import LEASE_KEYS, MOVES, Part, pd_double, pd_stack
from tests.integration.stack import eventually

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 30
PD = {"p": Part("prefill"), "d": Part("decode")}
COMPLETION = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 4, "temperature": 0}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": DOCUMENT}],
    "max_completion_tokens": 4,
}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ENDPOINTS = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)],
    ids=["completion", "chat"],
)


async def read(stack, path, body, **headers):
    async with stack.ingress.session.post(
        stack.ingress.url + path, json=body, headers=headers
    ) as response:
        return response, await response.read()


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_is_prefilled_by_one_engine_and_answered_by_the_other(path, body, stream):
    async with pd_stack(PD) as stack:
        sent = body | (
            {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        )
        response, answer = await read(stack, path, sent, **{"X-Request-Id": "one-id"})
        assert response.status == 200
        assert response.headers["x-nearkv-engine"] == "d"
        assert response.headers["x-nearkv-prefill-engine"] == "p"
        assert response.headers["x-nearkv-reason"] == "pd"
        (prefill,), (decode,) = stack.legs("p"), stack.legs("d")
        assert prefill["path"] == decode["path"] == path
        assert {leg["headers"]["x-request-id"] for leg in (prefill, decode)} == {"one-id"}
        for name in ("prompt", "messages", "model"):
            assert prefill["body"].get(name) == decode["body"].get(name) == body.get(name)
        assert prefill["body"]["kv_transfer_params"] == ASKED
        assert prefill["body"]["stream"] is False
        assert prefill["body"]["max_tokens"] == 1
        assert "stream_options" not in prefill["body"]
        assert ("max_completion_tokens" in prefill["body"]) is ("chat" in path)
        params = decode["body"].pop("kv_transfer_params")
        assert decode["body"] == sent
        assert params["do_remote_prefill"] is True
        assert params.items() >= LEASE_KEYS.items()
        assert b'"cached_tokens":0' not in answer
        assert answer.rstrip().endswith(b"data: [DONE]") is stream


async def test_the_decode_leg_is_the_clients_body_byte_for_byte_and_one_more_field():
    raw = (
        b'{ "model":"tiny", "prompt" : "' + b"\\u00e9 \\/ \xc3\xa9 " * 40 + b'","max_tokens":3 }\n'
    )
    async with pd_stack(PD) as stack:
        async with stack.ingress.session.post(
            stack.ingress.url + "/v1/completions",
            data=raw,
            headers={"Content-Type": "application/json"},
        ) as response:
            assert response.status == 200
        (body,) = stack.bodies("d")
        assert body.startswith(raw.rstrip()[:-1] + b',"kv_transfer_params":{')
        (leg,) = stack.bodies("p")
        assert raw.split(b" : ")[1].split(b',"max')[0] in leg


async def test_what_the_decode_engine_pulled_is_predicted_learnt_and_no_check_of_parity():
    async with pd_stack(PD) as stack:
        response, body = await stack.ingress.complete(DOCUMENT)
        reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        predicted = int(response.headers["x-nearkv-predicted-cached-tokens"])
        tokens = body["usage"]["prompt_tokens"]
        assert predicted == (tokens - 1) // 32 * 32
        assert reported == tokens - 1  # the double moves like the stock connector
        assert await stack.counts("parity_checks") == {("equal",): 1}  # that of P
        totals = stack.ingress.knowledge.totals
        assert (totals.prompt_tokens, totals.predicted_tokens) == (tokens, 0)
        await stack.synced()
        depths = {
            view.info.id: len(view.slots) for view in stack.ingress.knowledge.fleet.serving("tiny")
        }
        assert depths == {"p": 1, "d": 1}


async def test_nothing_is_in_flight_afterwards():
    async with pd_stack(PD) as stack:
        await stack.ingress.complete(DOCUMENT)
        know = stack.ingress.knowledge
        assert know.ledger.total_requests == 0
        for view in know.fleet.engines.values():
            key = (view.info.id, view.info.incarnation)
            assert (know.computing.at(*key), know.staged.at(*key)) == (0, 0)


async def test_both_engines_are_counted_while_their_legs_run():
    async with pd_stack(PD, doubles={"p": pd_double(overhead_seconds=0.05)}) as stack:
        know = stack.ingress.knowledge
        ledger, held = know.ledger, []
        opened = ledger.open

        def open_entry(*entry):
            result = opened(*entry)
            held.append(
                {
                    e: know.ledger.at(e, v.info.incarnation).requests
                    for e, v in know.fleet.engines.items()
                }
            )
            return result

        ledger.open = open_entry
        await stack.ingress.complete(DOCUMENT)
        assert held == [{"p": 0, "d": 1}, {"p": 1, "d": 1}]


async def test_stock_connectors_go_the_same_way():
    nixl = TransferInfo(mode="nixl", compat="c")
    parts = {"p": Part("prefill", nixl), "d": Part("decode", nixl)}
    doubles = {name: pd_double(transfer_keys="{}") for name in parts}
    async with pd_stack(parts, doubles=doubles) as stack:
        response, body = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-reason"] == "pd"
        predicted = int(response.headers["x-nearkv-predicted-cached-tokens"])
        assert predicted == body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "other",
    [TransferInfo(mode="agent", compat="x"), TransferInfo(mode="nixl", compat="c"), None],
    ids=["layout", "mode", "none"],
)
async def test_engines_that_do_not_fit_are_never_paired(other):
    async with pd_stack({"p": Part("prefill"), "d": Part("decode", other)}) as stack:
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] == "d"
        assert "x-nearkv-prefill-engine" not in response.headers
        assert stack.legs("p") == []


async def test_a_decode_engine_without_room_for_the_prompt_is_in_no_pair():
    async with pd_stack(PD, room_margin_tokens=600 * 32) as stack:
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] == "d"
        assert stack.legs("p") == []
        assert await stack.counts("pd_decisions") == {("local", "no_room"): 1}


UNSPLITTABLE = {
    "several_answers": {"n": 1.0},
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "own_params": {"kv_transfer_params": {"do_remote_decode": True}},
}


@pytest.mark.parametrize("why", UNSPLITTABLE)
async def test_what_cannot_be_split_is_served_whole_and_unchanged(why):
    params = {"models": {"client_transfer_params": True}}
    async with pd_stack(PD, ingress=params) as stack:
        body = COMPLETION | UNSPLITTABLE[why]
        response, _ = await read(stack, "/v1/completions", body)
        assert response.headers["x-nearkv-engine"] == "d"
        assert stack.legs("p") == []
        assert stack.legs("d")[0]["body"] == body
        assert await stack.counts("pd_decisions") == {("local", why): 1}


async def test_embeddings_are_served_whole():
    async with pd_stack(PD) as stack:
        response, _ = await read(stack, "/v1/embeddings", {"model": "tiny", "input": DOCUMENT})
        assert response.headers["x-nearkv-engine"] == "d"
        assert await stack.counts("pd_decisions") == {("local", "no_tokens"): 1}


async def test_short_prompts_are_never_split():
    async with pd_stack(PD, min_tokens=256) as stack:
        response, _ = await stack.ingress.complete("hello")
        assert response.headers["x-nearkv-engine"] == "d"
        assert await stack.counts("pd_decisions") == {("local", "short"): 1}


async def test_with_mode_off_bodies_headers_and_routes_are_as_without_pairs():
    plain = {"p": Part("both", None), "d": Part("both", None)}
    off = {"p": Part("prefill"), "d": Part("both")}
    seen = []
    for parts, mode in ((plain, "auto"), (off, "off")):
        async with pd_stack(parts, mode=mode) as stack:
            answers = []
            for prompt in (DOCUMENT, DOCUMENT + "And back?", "hello"):
                await stack.synced()
                response, _ = await stack.ingress.complete(prompt)
                ours = {k: v for k, v in response.headers.items() if k.startswith("x-nearkv")}
                answers.append(ours)
            seen.append((answers, stack.bodies("p"), stack.bodies("d")))
            assert await stack.counts("pd_decisions") == {}
    assert seen[0] == seen[1]


async def test_by_cost_two_idle_engines_are_no_better_than_one():
    async with pd_stack(PD, mode="auto") as stack:
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] == "d"
        assert response.headers["x-nearkv-reason"] == "prefix_miss"
        assert await stack.counts("pd_decisions") == {("local", "not_cheaper"): 1}


SLOW_PREFILL = {"prefill_tokens_per_second": 4000}
SLOW_PRIOR = {"seconds_per_token": 1 / 4000}


async def test_by_cost_a_prefix_that_another_engine_holds_is_pulled_from_there():
    doubles = {name: pd_double(**SLOW_PREFILL) for name in PD}
    async with pd_stack(PD, mode="auto", doubles=doubles, prior=SLOW_PRIOR) as stack:
        async with stack.ingress.session.post(
            stack.engines["p"].url + "/v1/completions", json=COMPLETION
        ) as warmed:
            assert warmed.status == 200
        await stack.synced()
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] == "d"
        assert response.headers["x-nearkv-prefill-engine"] == "p"
        assert response.headers["x-nearkv-reason"] == "pull"
        totals = stack.ingress.knowledge.totals
        assert totals.predicted_tokens == (totals.prompt_tokens - 1) // 32 * 32
        await stack.synced()
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-reason"] == "prefix_hit"  # now it is here as well
        assert await stack.counts("pd_decisions") == {
            ("pull", "cheaper"): 1,
            ("local", "not_cheaper"): 1,
        }


async def test_by_cost_a_slow_path_is_not_taken():
    slow = PathReading(
        source="n1", target="n1", path="tcp", setup_seconds=60.0, bytes_per_second=1e9, points=9
    )
    doubles = {name: pd_double(**SLOW_PREFILL) for name in PD}
    async with pd_stack(PD, mode="auto", doubles=doubles, paths=[slow], prior=SLOW_PRIOR) as stack:
        async with stack.ingress.session.post(
            stack.engines["p"].url + "/v1/completions", json=COMPLETION
        ):
            pass
        await stack.synced()
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-reason"] == "prefix_miss"


async def test_an_engine_tells_how_long_its_prefill_takes():
    doubles = {"p": pd_double(prefill_tokens_per_second=20_000), "d": pd_double()}
    async with pd_stack(PD, doubles=doubles) as stack:
        await stack.ingress.complete(DOCUMENT)
        view = stack.ingress.knowledge.fleet.engines["p"]
        await eventually(
            lambda: view.gauges and view.gauges.prefill_seconds_per_token, what="speed is told"
        )
        assert view.gauges.prefill_seconds_per_token >= 1 / 20_000


async def test_the_status_tells_pairs_paths_and_settings():
    path = PathReading(
        source="n1", target="n1", path="shm", setup_seconds=0.5, bytes_per_second=1e9, points=7
    )
    async with pd_stack(PD, paths=[path]) as stack:
        async with stack.ingress.session.get(stack.ingress.url + "/v1/status") as answer:
            status = await answer.json()
        assert status["pd"] == {
            "mode": "always",
            "min_tokens": 1,
            "hysteresis_ratio": 0.1,
            "pairs": {"tiny": 1},
            "paths": [
                {
                    "source": "n1",
                    "target": "n1",
                    "path": "shm",
                    "setup_seconds": 0.5,
                    "bytes_per_second": 1e9,
                    "points": 7,
                }
            ],
        }
        assert [engine["transfer"] for engine in status["engines"]] == [MOVES.mode] * 2


async def test_errors_of_the_client_are_those_of_one_engine_alone():
    async with pd_stack(PD) as stack:
        response, answer = await read(
            stack, "/v1/completions", COMPLETION | {"max_tokens": 100_000}
        )
        assert response.status == 400
        assert "maximum context length" in json.loads(answer)["error"]["message"]
        assert await stack.counts("retries") == {}


async def test_a_prefill_engine_that_refuses_leaves_the_request_to_another_alone():
    async with pd_stack(PD) as stack:
        await stack.engines["p"].inject(Faults(answer_status=404))
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.status == 200
        assert response.headers["x-nearkv-engine"] == "d"
        assert "x-nearkv-prefill-engine" not in response.headers
        assert await stack.counts("pd_legs") == {("prefill", "refused"): 1}
        know = stack.ingress.knowledge
        incarnation = know.fleet.engines["p"].info.incarnation
        assert not know.suspects.is_suspect("p", incarnation, 0.0)
