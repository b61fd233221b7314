"""Who made which response."""

import pytest

from nearkv.ingress.response_owners import ResponseOwners, response_id_of

CREATED = b'event: response.created\ndata: {"response":{"id":"resp_1","object":"response"}}\n\n'


def test_an_owner_is_known_until_its_time_is_up():
    owners = ResponseOwners(seconds=10)
    owners.learn("r", "a", "i", now=5)
    assert (owners.find("r", 14.9).engine, owners.find("r", 14.9).incarnation) == ("a", "i")
    assert owners.find("r", 15) is None
    assert len(owners) == 0


def test_the_latest_are_kept():
    owners = ResponseOwners(most=2)
    for response_id in ("r1", "r2", "r1", "r3"):
        owners.learn(response_id, "a", "i", now=0)
    assert len(owners) == 2
    assert owners.find("r2", 0) is None
    assert owners.find("r1", 0) is not None


def test_what_is_too_old_is_swept():
    owners = ResponseOwners(seconds=10)
    for i in range(5):
        owners.learn(f"r{i}", "a", "i", now=i)
    owners.sweep(12)
    assert len(owners) == 2


def test_odd_ids_are_not_learnt():
    owners = ResponseOwners()
    owners.learn("", "a", "i", now=0)
    owners.learn("x" * 257, "a", "i", now=0)
    assert len(owners) == 0


@pytest.mark.parametrize(
    ("first", "whole", "response_id"),
    [
        pytest.param(b'{"output": [{"id": "msg"}], "id": "resp_1"}', True, "resp_1", id="whole"),
        pytest.param(b'{"id": "resp_1", "output"', False, "resp_1", id="beginning"),
        pytest.param(CREATED, False, "resp_1", id="stream"),
        pytest.param(CREATED, True, "resp_1", id="whole stream"),
        pytest.param(b'{"object": "list"}', True, "", id="without id"),
        pytest.param(b'{"id": 7}', True, "", id="number"),
        pytest.param(b"{", True, "", id="broken"),
        pytest.param(b"", False, "", id="nothing"),
        pytest.param(b'{"id": "a\\"b"}', False, "", id="escaped"),
    ],
)
def test_an_answer_s_beginning_shows_its_id(first, whole, response_id):
    assert response_id_of(first, whole=whole) == response_id
