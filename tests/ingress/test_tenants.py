"""Tenants: keys from a file, limits by token bucket."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.errors import KeyRefusedError, TenantLimitError
from nearkv.ingress.tenants import TenantFileError, Tenants, read_tenants
from nearkv.ingress.token_bucket import TokenBucket


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def specs(*tenants):
    return read_tenants(json.dumps({"tenants": tenants}).encode())


def tenant(name="a", **fields):
    return {"name": name, "keys": [f"sk-{name}"], **fields}


@pytest.fixture
def tenants(clock):
    made = Tenants(clock)
    made.replace(
        specs(
            tenant("a", requests_per_second=2, burst_requests=3),
            tenant("b", tokens_per_second=100, burst_tokens=500),
            tenant("free"),
        )
    )
    return made


def test_a_file_may_be_yaml():
    (spec,) = read_tenants(b"tenants:\n- name: a\n  keys: [k1, k2]\n  requests_per_second: 5\n")
    assert (spec.name, spec.keys, spec.requests_per_second) == ("a", ("k1", "k2"), 5.0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"tenants: [", "not a list of tenants", id="no YAML"),
        pytest.param(b"\xff\xfe\x00", "not a list of tenants", id="no text"),
        pytest.param(b"", "not a list of tenants", id="empty"),
        pytest.param(b"tenants: [{name: a}]", "keys", id="no keys"),
        pytest.param(b"tenants: [{name: a, keys: [k], tpyo: 1}]", "tpyo", id="unknown field"),
        pytest.param(b"tenants: [{name: a, keys: ['']}]", "keys: is empty", id="empty key"),
        pytest.param(b"tenants: [{name: '', keys: [k]}]", "name: is empty", id="no name"),
        pytest.param(
            b"tenants: [{name: a, keys: [k]}, {name: b, keys: [k]}]", "keys: one", id="shared key"
        ),
        pytest.param(
            b"tenants: [{name: a, keys: [k], tokens_per_second: 0}]",
            "a.tokens_per_second: must be above 0",
            id="limit of nothing",
        ),
    ],
)
def test_files_that_cannot_be_used_say_why(data, said):
    with pytest.raises(TenantFileError, match=said):
        read_tenants(data)


def test_whose_key_it_is(tenants):
    assert tenants.admit("sk-free").spec.name == "free"
    with pytest.raises(KeyRefusedError, match="not known"):
        tenants.admit("sk-nobody")
    with pytest.raises(KeyRefusedError, match="is needed"):
        tenants.admit("")


def test_a_tenant_over_its_requests_is_told_when_to_come_back(tenants, clock):
    for _ in range(3):
        tenants.admit("sk-a")
    with pytest.raises(TenantLimitError, match="tenant a is over its limit of requests") as caught:
        tenants.admit("sk-a")
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("tenant_requests", 1)
    tenants.admit("sk-free")
    clock.now += 0.5
    tenants.admit("sk-a")
    with pytest.raises(TenantLimitError):
        tenants.admit("sk-a")


def test_tokens_are_charged_and_a_prompt_larger_than_the_bucket_leaves_a_debt(tenants, clock):
    b = tenants.admit("sk-b")
    tenants.charge(b, 2000)
    with pytest.raises(TenantLimitError) as caught:
        tenants.charge(b, 1)
    assert caught.value.reason == "tenant_tokens"
    assert caught.value.retry_after_seconds == 16  # 1,501 tokens at 100 a second
    clock.now += 15.02
    tenants.charge(b, 1)


def test_a_new_file_takes_keys_away_and_leaves_levels_alone(tenants):
    for _ in range(3):
        tenants.admit("sk-a")
    same = tenant("a", requests_per_second=2, burst_requests=3)
    tenants.replace(specs(same))
    with pytest.raises(TenantLimitError):
        tenants.admit("sk-a")
    with pytest.raises(KeyRefusedError):
        tenants.admit("sk-free")
    tenants.replace(specs(same | {"burst_requests": 4}))
    tenants.admit("sk-a")


amounts = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 50)), max_size=60)


@given(amounts, st.floats(0.1, 20), st.floats(1, 100))
def test_no_more_than_the_rate_and_one_burst_is_ever_given(steps, per_second, burst):
    bucket = TokenBucket(per_second, burst, burst, 0.0)
    now = given_out = largest = 0.0
    for pause, amount in steps:
        now += pause
        largest = max(largest, amount)
        wait = bucket.take(amount, now)
        given_out += 0.0 if wait else amount
        assert given_out <= per_second * now + burst + largest + 1e-6
        if wait:
            assert bucket.take(amount, now + wait + 1e-6) == 0.0
            now += wait + 1e-6
            given_out += amount
