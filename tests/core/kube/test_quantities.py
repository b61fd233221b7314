import contextlib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.kube.quantities import LARGEST, parse_quantity, whole_count


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", "8"),
        ("0", "0"),
        ("1k", "1000"),
        ("1.5Gi", "1610612736"),
        ("64Ki", "65536"),
        ("100m", "0.1"),
        ("5u", "0.000005"),
        ("7n", "0.000000007"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1E", "1000000000000000000"),
        ("1Ei", "1152921504606846976"),
        ("12e-1", "1.2"),
        ("+4", "4"),
        ("-4", "-4"),
        (".5", "0.5"),
        ("5.", "5"),
    ],
)
def test_quantity_is_read(text, value):
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "abc", "1 k", "1K", "1ki", "1e", "1kk", "--1", "1,5", "٣", "1\n", "0x10"),
        *("1e999", "1e9999", "9" * 100, "10E", "NaN", "Infinity"),
    ],
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match=r"quantity|unit"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8", 8), (8, 8), ("1k", 1000), ("1500m", 1), ("0", 0), ("-1", 0), (-3, 0), ("08", 8)],
)
def test_whole_things_are_counted_down(text, count):
    assert whole_count(text) == count


@given(st.integers(0, LARGEST))
def test_every_number_reads_as_itself(number):
    assert whole_count(str(number)) == number


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ValueError):
        assert whole_count(text) <= LARGEST
