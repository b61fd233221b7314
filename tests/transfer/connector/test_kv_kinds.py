"""Which caches can be given to others."""

from types import SimpleNamespace

import pytest

from nearkv.transfer.connector.kv_kinds import why_not_kept
from nearkv.transfer.errors import Reason


def kind(name, *bases):
    return type(name, bases, {})


FULL = kind("FullAttentionSpec")
WINDOW = kind("SlidingWindowSpec")


@pytest.mark.parametrize("spec", [FULL, kind("MLAAttentionSpec", FULL)])
def test_full_attention_keeps_every_block(spec):
    assert why_not_kept(spec()) is None


@pytest.mark.parametrize(
    "spec",
    [
        WINDOW,
        kind("SlidingWindowMLASpec", WINDOW),
        kind("ChunkedLocalAttentionSpec"),
        kind("MambaSpec"),
        kind("RSWASpec", FULL),
        kind("SomethingNew"),
    ],
)
def test_whatever_lets_go_of_blocks_is_not_transferred(spec):
    assert why_not_kept(spec()).reason is Reason.KV_GROUPS


def test_of_several_specs_all_count():
    both = SimpleNamespace(kv_cache_specs={"a": FULL(), "b": WINDOW()})
    assert "SlidingWindowSpec" in str(why_not_kept(both))
    assert why_not_kept(SimpleNamespace(kv_cache_specs={"a": FULL()})) is None
