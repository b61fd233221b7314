"""How much of a lease fits a request: by what the KV is, then by whole blocks of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.agent.transfer.fitting import fitting_blocks
from nearkv.transfer.errors import PacketError, Reason
from nearkv.transfer.manifest import Manifest, Prefix, Source
from tests.doubles.kv_engine import KvShape, pack

SHAPE = KvShape(block_size=4)
OWN = SHAPE.compatibility()
TOKENS = list(range(1, 13))


def manifest(tokens=TOKENS, blocks=3, shape=SHAPE, **prefix):
    return Manifest(
        compatibility=shape.compatibility(),
        source=Source(engine="p", epoch="e"),
        prefix=Prefix(
            **{"token_ids": pack(tokens), "num_tokens": len(tokens), "block_keys": b"", **prefix}
        ),
        block_ids=tuple(range(blocks)),
    )


def refusal(*args, **kwargs):
    with pytest.raises(PacketError) as raised:
        fitting_blocks(*args, **kwargs)
    return raised.value.reason, str(raised.value)


def test_equal_tokens_fit_whole():
    assert fitting_blocks(manifest(), OWN, pack([*TOKENS, 77])) == 3


def test_a_shorter_request_gets_its_own_whole_blocks():
    assert fitting_blocks(manifest(), OWN, pack(TOKENS[:11])) == 2


def test_tokens_that_differ_later_leave_the_blocks_before():
    assert fitting_blocks(manifest(), OWN, pack([*TOKENS[:9], 0, *TOKENS[10:]])) == 2


def test_tokens_that_differ_in_the_first_block_leave_nothing():
    reason, text = refusal(manifest(), OWN, pack([0, *TOKENS[1:]]))
    assert (reason, "token_ids" in text) == (Reason.PREFIX, True)


def test_a_request_below_one_block_gets_nothing():
    assert refusal(manifest(), OWN, pack(TOKENS[:3]))[0] is Reason.RANGE
    assert refusal(manifest(), OWN, b"")[0] is Reason.RANGE


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"config_hash": "other"}, Reason.MODEL, "config_hash"),
        ({"kv_dtype": "float16"}, Reason.DTYPE, "kv_dtype"),
        ({"tp_size": 2}, Reason.TOPOLOGY, "tp_size"),
        ({"layout": "LBHNC"}, Reason.LAYOUT, "name"),
        ({"block_size": 8}, Reason.LAYOUT, "block_size"),
        ({"block_bytes": 2048}, Reason.LAYOUT, "block_bytes"),
        ({"layers": 4}, Reason.LAYOUT, "layers"),
    ],
)
def test_what_differs_is_named(change, reason, field):
    shape = KvShape(**{"block_size": 4, **change})
    found, text = refusal(manifest(shape=shape), OWN, pack(TOKENS))
    assert (found, text.startswith(field)) == (reason, True)


def test_the_models_name_does_not_count():
    assert fitting_blocks(manifest(shape=KvShape(model="alias")), OWN, pack(TOKENS)) == 3


def test_salt_and_adapter_must_be_equal_and_the_salt_stays_secret():
    reason, text = refusal(manifest(cache_salt="secret"), OWN, pack(TOKENS), cache_salt="other")
    assert (reason, "secret" in text, "cache_salt" in text) == (Reason.PREFIX, False, True)
    reason, text = refusal(manifest(lora="a"), OWN, pack(TOKENS))
    assert (reason, "lora" in text) == (Reason.PREFIX, True)
    assert fitting_blocks(
        manifest(cache_salt="s", lora="a"), OWN, pack(TOKENS), cache_salt="s", lora="a"
    )


def test_a_packet_that_contradicts_itself_is_refused():
    assert refusal(manifest(num_tokens=11), OWN, pack(TOKENS))[0] is Reason.PREFIX
    assert refusal(manifest(blocks=4), OWN, pack(TOKENS))[0] is Reason.RANGE


@given(
    theirs=st.lists(st.integers(0, 1), min_size=4, max_size=40),
    ours=st.lists(st.integers(0, 1), min_size=4, max_size=40),
)
def test_exactly_the_equal_leading_blocks_fit(theirs, ours):
    theirs = theirs[: len(theirs) // 4 * 4]
    equal = 0
    while (equal + 1) * 4 <= min(len(theirs), len(ours)) and (
        theirs[: (equal + 1) * 4] == ours[: (equal + 1) * 4]
    ):
        equal += 1
    packet = manifest(theirs, blocks=len(theirs) // 4)
    if equal:
        assert fitting_blocks(packet, OWN, pack(ours)) == equal
    else:
        assert refusal(packet, OWN, pack(ours))[0] is Reason.PREFIX
