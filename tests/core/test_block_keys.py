"""The block key format: agents and ingresses of different versions must agree on it."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkv.block_keys import (
    KeyNamespace,
    chain_keys,
    fold_extra,
    pack_keys,
    pack_tokens,
    root_key,
    unpack_keys,
)

TINY = KeyNamespace("tiny")
tokens = st.integers(min_value=0, max_value=2**32 - 1)
keys = st.integers(min_value=0, max_value=2**64 - 1)


# The published format. A change here breaks mixed versions in one cluster: raise the tag.
@pytest.mark.parametrize(
    ("namespace", "secret", "expected"),
    [
        pytest.param(KeyNamespace(""), b"", 0x8A99AE61B7CBAF90, id="nothing"),
        pytest.param(TINY, b"", 0xCB2E2BB691C101A3, id="model"),
        pytest.param(KeyNamespace("tiny", lora="sql"), b"", 0x74725D9C28B7E033, id="lora"),
        pytest.param(KeyNamespace("tiny", salt="s1"), b"", 0x38A60C41B6164118, id="salt"),
        pytest.param(
            KeyNamespace("tiny", "sql", "s1"),
            b"cluster secret",
            0x939DF88916B7E0B7,
            id="all-and-secret",
        ),
    ],
)
def test_root_keys_keep_their_published_values(namespace, secret, expected):
    assert root_key(namespace, secret) == expected


def test_chained_keys_keep_their_published_values():
    first, second = chain_keys(root_key(TINY), pack_tokens(range(64)), 32)
    assert (first, second) == (0xC496E8E8362483A4, 0x25A966FBAF62CF2F)
    assert fold_extra(first, b"image") == 0x7034F99E274A74B6


def test_a_golden_prompt_differs_in_every_namespace():
    spaces = [
        TINY,
        KeyNamespace("other"),
        KeyNamespace("tiny", "s1"),
        KeyNamespace("tiny", "", "s1"),
    ]
    roots = {root_key(space, secret) for space in spaces for secret in (b"", b"x", b"y")}
    assert len(roots) == len(spaces) * 3


@given(st.tuples(*[st.text(string.ascii_letters, max_size=4)] * 6))
@settings(max_examples=200, deadline=None)
def test_namespaces_never_run_into_each_other(parts):
    one, other = KeyNamespace(*parts[:3]), KeyNamespace(*parts[3:])
    assert (root_key(one) == root_key(other)) == (one == other)


def test_a_secret_over_64_bytes_is_refused():
    assert root_key(TINY, b"x" * 64) != root_key(TINY, b"x" * 63)
    with pytest.raises(ValueError, match="key"):
        root_key(TINY, b"x" * 65)


def test_tokens_are_packed_little_endian():
    assert pack_tokens([1, 0x0A0B0C0D, 2**32 - 1]).hex() == "010000000d0c0b0affffffff"
    assert pack_tokens([]) == b""


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, 1.0, "1", None, [1]], ids=repr)
def test_bad_tokens_are_refused(token):
    with pytest.raises(ValueError, match="token ids must be integers"):
        pack_tokens([1, token])


@given(st.lists(keys, max_size=50))
def test_keys_survive_packing(values):
    assert unpack_keys(pack_keys(values)) == tuple(values)


@pytest.mark.parametrize("length", [1, 7, 9, 15])
def test_left_over_bytes_are_refused(length):
    with pytest.raises(ValueError, match=f"got {length}"):
        unpack_keys(b"x" * length)


@pytest.mark.parametrize(
    ("count", "blocks"),
    [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (33, 2)],
)
def test_only_full_blocks_have_keys(count, blocks):
    got = chain_keys(root_key(TINY), pack_tokens(range(count)), 16)
    assert got == chain_keys(root_key(TINY), pack_tokens(range(64)), 16)[:blocks]


@given(
    parent=keys,
    head=st.integers(0, 6),
    tail=st.lists(tokens, max_size=40),
    block_size=st.integers(1, 8),
    data=st.data(),
)
@settings(deadline=None)
def test_a_chain_continues_from_its_parent(parent, head, tail, block_size, data):
    front = data.draw(st.lists(tokens, min_size=head * block_size, max_size=head * block_size))
    before = chain_keys(parent, pack_tokens(front), block_size)
    after = chain_keys(before[-1] if before else parent, pack_tokens(tail), block_size)
    assert chain_keys(parent, pack_tokens([*front, *tail]), block_size) == before + after


@given(prompt=st.lists(tokens, min_size=8, max_size=8), at=st.integers(0, 7))
@settings(deadline=None)
def test_a_changed_token_changes_its_block_and_all_later_ones(prompt, at):
    changed = [*prompt]
    changed[at] ^= 1
    old, new = (chain_keys(root_key(TINY), pack_tokens(p), 2) for p in (prompt, changed))
    assert [a == b for a, b in zip(old, new, strict=True)] == [i < at // 2 for i in range(4)]


def test_an_extra_separates_by_content_and_place():
    folded = {fold_extra(key, extra) for key in (1, 2) for extra in (b"", b"a", b"b")}
    assert len(folded) == 6
    assert folded.isdisjoint({1, 2})
