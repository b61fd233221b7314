"""The key table against a plain dict."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from nearkv.ingress import key_table
from nearkv.ingress.key_table import SLOT_BYTES, KeyTable, capacity_within

COLLIDING = [8 * i - 1 for i in range(1, 20)] + [(1 << 64) - 1, 2, 3, 4]
"""In a table of a few places these push each other aside, and around its end."""
KEYS = st.lists(st.sampled_from(COLLIDING), max_size=12, unique=True)
VALUES = st.integers(1, 7)


class TableAgainstDict(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = KeyTable()
        self.held = {}

    @rule(keys=KEYS, value=VALUES)
    def merge(self, keys, value):
        self.table.reserve(len(keys))
        self.table.merge(keys, value, lambda old: old % 7 + 1)
        for key in keys:
            old = self.held.get(key)
            self.held[key] = old if old == value else value if old is None else old % 7 + 1

    @rule(keys=KEYS, value=st.integers(0, 7))
    def change(self, keys, value):
        self.table.change(keys, lambda _: value)
        for key in self.held.keys() & set(keys):
            self._set(key, value)

    @rule(pinned=st.booleans())
    def pin(self, pinned):
        self.table.pinned = pinned

    @rule(gone=VALUES, other=VALUES)
    def rewrite_everything(self, gone, other):
        new = np.array([0, *range(1, 8)], dtype=np.uint32)
        new[other] = 1
        new[gone] = 0
        self.table.rewrite_values(0, self.table.slot_count, new)
        for key, value in list(self.held.items()):
            self._set(key, int(new[value]))

    def _set(self, key, value):
        if value:
            self.held[key] = value
        else:
            del self.held[key]

    @invariant()
    def both_agree(self):
        assert self.table.live == len(self.held)
        assert self.table.live + self.table._dead == np.count_nonzero(self.table._keys_view)
        assert self.table.find(COLLIDING).tolist() == [self.held.get(k, 0) for k in COLLIDING]
        assert [self.table.get(k) for k in COLLIDING] == [self.held.get(k, 0) for k in COLLIDING]
        assert set(self.table.used_values().tolist()) - {0} == set(self.held.values())


def test_the_table_agrees_with_a_dict(monkeypatch):
    monkeypatch.setattr(key_table, "_LEAST_SLOTS", 4)
    run_state_machine_as_test(
        TableAgainstDict,
        settings=settings(max_examples=80, stateful_step_count=30, deadline=None),
    )


def test_key_zero_is_a_key_like_others():
    table = KeyTable()
    table.merge([0], 5, int)
    assert table.get(0) == 5
    assert table.find([0, 9]).tolist() == [5, 0]
    table.change([0], lambda _: 0)
    assert table.get(0) == 0


def test_no_key_moves_while_the_table_is_pinned():
    table = KeyTable()
    home = 10
    pushed = home + table.slot_count
    table.merge([home, pushed], 1, int)
    table.pinned = True
    table.change([home], lambda _: 0)
    table.rewrite_values(home + 1, home + 2, np.array([0, 2], dtype=np.uint32))
    assert table.get(pushed) == 2, "it is where it was"
    assert table.live == 1


@pytest.mark.parametrize("limit_bytes", [20_000, 100_000, 1 << 30])
def test_a_full_table_stays_within_its_bytes(limit_bytes):
    capacity = capacity_within(limit_bytes)
    slots = 2 * capacity
    assert slots * SLOT_BYTES <= limit_bytes < 2 * slots * SLOT_BYTES


def test_it_grows_by_doubling_and_keeps_everything():
    table = KeyTable()
    keys = [i * 0x9E3779B97F4A7C15 % (1 << 64) for i in range(1, 5001)]
    for start in range(0, 5000, 100):
        table.reserve(100)
        table.merge(keys[start : start + 100], 3, int)
    assert (table.find(keys) == 3).all()
    assert table.live == 5000
    assert table.slot_count == 16384
