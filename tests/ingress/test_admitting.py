"""Keys and priorities in requests' headers, and the file that keys come from."""

import asyncio
import time

import pytest
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from nearkv.ingress.admitting import PRIORITY_HEADER, Admission, read_priority
from nearkv.ingress.errors import KeyRefusedError, RequestError
from nearkv.ingress.key_file import KeyFile
from nearkv.ingress.metrics import AdmissionMetrics
from nearkv.ingress.tenants import TenantFileError, Tenants
from nearkv.ingress.waiting_room import RoomLimits, WaitingRoom
from tests.integration.stack import eventually

FILE = "tenants: [{name: a, keys: [sk-a], max_priority: 1}]"


def admission(tenants=None):
    metrics = AdmissionMetrics(CollectorRegistry())
    return Admission(WaitingRoom(RoomLimits(1, 1.0, 1)), metrics, tenants, waits=True)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    counted = []
    made = KeyFile(path, Tenants(time.monotonic), seconds=0.01, count=counted.append)
    made.load()
    return made, path, counted


def headers(**given):
    return CIMultiDict({name.replace("_", "-"): value for name, value in given.items()})


@pytest.mark.parametrize(("text", "priority"), [("0", 0), ("-100", -100), ("+7", 7), (" 3 ", 3)])
def test_priorities(text, priority):
    assert read_priority(text) == priority


@pytest.mark.parametrize("text", ["", "high", "1.5", "101", "-101", "9" * 5000])
def test_what_is_no_priority_is_told_by_the_headers_name(text):
    with pytest.raises(RequestError, match=PRIORITY_HEADER) as caught:
        read_priority(text)
    assert (caught.value.status, caught.value.param) == (400, PRIORITY_HEADER)


def test_without_tenants_anybody_may_ask_at_any_priority():
    assert admission().admit(headers(X_Nearkv_Priority="50")) == (None, 50)
    assert admission().admit(headers()) == (None, 0)


@pytest.mark.parametrize(
    "given",
    [
        headers(Authorization="Bearer sk-a"),
        headers(Authorization="bearer  sk-a"),
        headers(x_api_key="sk-a"),
    ],
    ids=["openai", "in small letters", "other"],
)
def test_a_tenants_clients_claim_no_more_than_it_may(key_file, given):
    door = admission(key_file[0].tenants)
    for asked, got in (("50", 1), ("1", 1), ("-3", -3)):
        tenant, priority = door.admit(CIMultiDict(given, **{PRIORITY_HEADER: asked}))
        assert (tenant.spec.name, priority) == ("a", got)


@pytest.mark.parametrize(
    "given", [headers(), headers(Authorization="Basic sk-a"), headers(x_api_key="sk-b")]
)
def test_without_a_known_key_nobody_gets_in(key_file, given):
    with pytest.raises(KeyRefusedError):
        admission(key_file[0].tenants).admit(given)


async def test_a_changed_file_is_taken_and_a_broken_one_is_not(key_file, tmp_path):
    made, path, counted = key_file
    following = asyncio.create_task(made.follow())
    new = tmp_path / "new.yaml"
    new.write_text("tenants: [{name: b, keys: [sk-b]}]")
    new.replace(path)  # as a Secret changes: another file under the same name
    await eventually(lambda: counted == ["loaded", "loaded"], what="the new file is read")
    assert made.tenants.admit("sk-b").spec.name == "b"
    path.write_text("tenants: [")
    await eventually(lambda: counted.count("failed") > 2, what="it stays broken, says the count")
    path.unlink()
    seen = counted.count("failed")
    await eventually(lambda: counted.count("failed") > seen + 1, what="the file is missed")
    assert made.tenants.admit("sk-b").spec.name == "b"
    path.write_text(FILE)
    await eventually(lambda: counted[-1] == "loaded", what="it is whole again")
    assert made.tenants.admit("sk-a").spec.name == "a"
    following.cancel()


def test_at_the_start_the_file_must_be_there(tmp_path):
    missing = KeyFile(tmp_path / "no", Tenants(time.monotonic), seconds=1, count=print)
    with pytest.raises(TenantFileError, match="No such file"):
        missing.load()
