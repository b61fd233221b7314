"""Which engines may serve a request, when it comes and after it has waited."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from nearkv.ingress.errors import RequestError
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.selecting import RANK_HEADER, EngineSelector
from nearkv.ingress.settings import IngressSettings
from nearkv.state.model import EngineInfo


def view(name, *, incarnation="i", rank=None):
    info = EngineInfo(id=name, incarnation=incarnation, url=f"http://{name}", dp_rank=rank)
    return EngineView(info, "agent")


def selector(**models):
    settings = IngressSettings.model_validate({"listen": "127.0.0.1:0", "models": models})
    know = SimpleNamespace(fleet=Fleet(PrefixIndex(limit_bytes=1 << 20)))
    metrics = IngressMetrics(CollectorRegistry())
    return EngineSelector(know, metrics, None, settings=settings, now=lambda: 0.0)


def asked(**fields):
    return GenerateRequest(model=None, kind=PromptKind.NONE, **fields)


BEFORE = [view("a"), view("b", rank=1)]


@pytest.mark.parametrize(
    ("serving", "request_fields", "headers", "expected"),
    [
        ([view("a"), view("c")], {}, {}, ["a", "c"]),
        ([], {}, {}, ["a", "b"]),
        ([view("a"), view("c")], {"response_id": "r"}, {}, ["a"]),
        ([view("a", incarnation="j"), view("c")], {"response_id": "r"}, {}, ["a", "b"]),
    ],
    ids=["as it is now", "nobody is left", "who made it", "who made it is gone"],
)
def test_a_request_that_waited_may_go_where_the_fleet_is_now(
    serving, request_fields, headers, expected
):
    found = selector().present(BEFORE, serving, asked(**request_fields), headers)
    assert [v.info.id for v in found] == expected


def test_a_client_s_rank_holds_after_a_wait():
    now = [view("c", rank=0), view("d", rank=1)]
    headers = {RANK_HEADER: "1"}
    chosen = [BEFORE[1]]
    found = selector(client_ranks=True).present(chosen, now, asked(), headers)
    assert [v.info.id for v in found] == ["d"]
    assert selector().present(chosen, now, asked(), headers) == now


async def test_a_client_may_not_say_where_kv_lies():
    says = asked(transfer_field="kv_transfer_params")
    with pytest.raises(RequestError) as refused:
        await selector().narrow(BEFORE, says, {})
    assert refused.value.param == "kv_transfer_params"
    assert await selector(client_transfer_params=True).narrow(BEFORE, says, {}) == BEFORE
