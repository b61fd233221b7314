"""The state stream's framing: whole frames come out, nonsense is refused."""

import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkv.state.codec import MAX_FRAME_BYTES, FrameReader, StateDecodeError, encode_frame
from nearkv.state.model import (
    BlockChange,
    Blocks,
    Cursor,
    Delta,
    EngineGauges,
    EngineInfo,
    EngineState,
    EventsState,
    Heartbeat,
    PathClass,
    PathClasses,
    PathReading,
    SnapshotBegin,
    SnapshotEnd,
)

text = st.text(max_size=8)
texts = st.lists(text, max_size=3).map(tuple)
count = st.none() | st.integers(0, 2**63 - 1)
ratio = st.none() | st.floats(0, 1)
cursors = st.builds(Cursor, text, st.integers(0, 9), st.integers(0, 2**63 - 1))
infos = st.builds(
    EngineInfo,
    id=text,
    incarnation=text,
    url=text,
    models=texts,
    adapters=texts,
    state=st.sampled_from(EngineState),
    events=st.sampled_from(EventsState),
    block_size=count,
    key_check=st.integers(0, 2**64 - 1),
    engine_version=st.none() | text,
    dp_rank=count,
)
gauges = st.builds(
    EngineGauges, id=text, kv_used_ratio=ratio, kv_total_bytes=count, requests_waiting=count
)
changes = st.builds(
    BlockChange,
    engine=text,
    tier=text,
    cleared=st.booleans(),
    removed=st.binary(max_size=16),
    added=st.binary(max_size=16),
)
amounts = st.floats(0, 1e12)
path_fields = {
    "path": text,
    "setup_seconds": amounts,
    "bytes_per_second": amounts,
    "age_seconds": amounts,
}
paths = st.builds(PathReading, source=text, target=text, points=st.integers(0, 9), **path_fields)
path_classes = st.builds(
    PathClasses,
    levels=texts,
    labels=st.dictionaries(text, text, max_size=2),
    costs=st.lists(st.builds(PathClass, name=text, **path_fields), max_size=2).map(tuple),
)
frames = st.one_of(
    st.builds(
        SnapshotBegin,
        cursor=cursors,
        node=text,
        version=text,
        engines=st.lists(infos, max_size=2).map(tuple),
        gauges=st.lists(gauges, max_size=2).map(tuple),
        paths=st.lists(paths, max_size=2).map(tuple),
        path_classes=st.none() | path_classes,
    ),
    st.builds(Blocks, engine=text, tier=text, keys=st.binary(max_size=64)),
    st.builds(SnapshotEnd, cursor=cursors),
    st.builds(
        Delta,
        cursor=cursors,
        gone=texts,
        engines=st.lists(infos, max_size=2).map(tuple),
        blocks=st.lists(changes, max_size=2).map(tuple),
        gauges=st.lists(gauges, max_size=2).map(tuple),
        paths=st.lists(paths, max_size=2).map(tuple),
        path_classes=st.none() | path_classes,
    ),
    st.builds(Heartbeat, cursor=cursors, ages_seconds=st.dictionaries(text, st.floats(0, 1e9))),
)

CURSOR = Cursor("b", 0, 7)
SAMPLES = [
    SnapshotBegin(cursor=CURSOR, node="n", version="1", engines=(), gauges=()),
    Blocks(engine="e", tier="GPU", keys=b"12345678"),
    SnapshotEnd(cursor=CURSOR),
    Delta(cursor=CURSOR, gone=("e",)),
    Heartbeat(cursor=CURSOR, ages_seconds={"e": 1.5}),
]
STREAM = b"".join(map(encode_frame, SAMPLES))
ENDS = [sum(len(encode_frame(f)) for f in SAMPLES[:n]) for n in range(len(SAMPLES) + 1)]


@given(st.lists(frames, max_size=4))
@settings(max_examples=80, deadline=None)
def test_every_frame_survives_the_wire(sent):
    reader = FrameReader()
    assert list(reader.feed(b"".join(map(encode_frame, sent)))) == sent
    assert reader.pending_bytes == 0


def test_a_stream_may_arrive_byte_by_byte():
    reader = FrameReader()
    got = [frame for byte in STREAM for frame in reader.feed(bytes([byte]))]
    assert got == SAMPLES


def test_a_stream_cut_anywhere_yields_whole_frames_and_goes_on():
    for cut in range(len(STREAM) + 1):
        reader = FrameReader()
        whole = sum(end <= cut for end in ENDS) - 1
        assert list(reader.feed(STREAM[:cut])) == SAMPLES[:whole]
        assert reader.pending_bytes == cut - ENDS[whole]
        assert list(reader.feed(STREAM[cut:])) == SAMPLES[whole:]


def test_a_frame_over_the_limit_is_refused_by_its_length_alone():
    reader = FrameReader()
    with pytest.raises(StateDecodeError, match="over the limit"):
        list(reader.feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))


def test_a_frame_at_the_limit_is_waited_for():
    assert list(FrameReader().feed(struct.pack(">I", MAX_FRAME_BYTES) + b"x")) == []


def _frame_of(value):
    body = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="no-msgpack"),
        pytest.param([1, 2], id="no-map"),
        pytest.param({"type": "delta"}, id="field-missing"),
        pytest.param({"type": "later-version", "cursor": ["b", 0, 1]}, id="unknown-type"),
        pytest.param({"type": "end", "cursor": ["b", "0", 1]}, id="wrong-type"),
        pytest.param({"type": "end", "cursor": ["b", 0]}, id="short-cursor"),
        pytest.param(encode_frame(SAMPLES[2])[4:] + b"\x00", id="bytes-left-over"),
    ],
)
def test_nonsense_is_refused_after_the_good_frames_before_it(body):
    reader = FrameReader()
    feeding = reader.feed(encode_frame(SAMPLES[0]) + _frame_of(body))
    assert next(feeding) == SAMPLES[0]
    with pytest.raises(StateDecodeError, match="not a state frame"):
        next(feeding)


def test_fields_of_a_later_version_are_passed_over():
    body = {"type": "end", "cursor": ["b", 0, 7], "later": 1}
    assert list(FrameReader().feed(_frame_of(body))) == [SnapshotEnd(cursor=CURSOR)]


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_raises_nothing_else(data):
    with suppress(StateDecodeError):
        list(FrameReader().feed(data))


def test_a_cursor_survives_its_url_form():
    assert Cursor.parse(str(Cursor("9f3a", 2, 77))) == Cursor("9f3a", 2, 77)


@pytest.mark.parametrize(
    "wrong",
    ["", "b", "b:0", ":0:1", "b:0:1:2", "b:x:1", "b:0:", "b:0:1.5", "b:0:\x00", "x" * 500],
)
def test_a_bad_cursor_is_refused_with_a_short_reason(wrong):
    with pytest.raises(ValueError, match="cursor") as caught:
        Cursor.parse(wrong)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("ratio", "total", "used", "free"),
    [
        (0.25, 1000, 250, 750),
        (0.0, 1000, 0, 1000),
        (None, 1000, None, None),
        (0.5, None, None, None),
    ],
)
def test_used_and_free_bytes_are_unknown_where_a_part_is(ratio, total, used, free):
    reading = EngineGauges(id="e", kv_used_ratio=ratio, kv_total_bytes=total)
    assert (reading.kv_used_bytes, reading.kv_free_bytes) == (used, free)


# -- Versions beside each other ------------------------------------------------------------------


class PathReadingBefore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A path's cost as the first versions knew it: without its age."""

    source: str
    target: str
    path: str
    setup_seconds: float
    bytes_per_second: float
    points: int = 0


class DeltaBefore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta"):
    """A delta as the first versions knew it: without costs by class."""

    cursor: Cursor
    paths: tuple[PathReadingBefore, ...] = ()


COST = {"path": "tcp", "setup_seconds": 0.5, "bytes_per_second": 1e9}


def test_an_older_consumer_reads_what_it_knows_of_paths():
    newer = Delta(
        cursor=CURSOR,
        paths=(PathReading(source="s", target="t", points=3, age_seconds=9.0, **COST),),
        path_classes=PathClasses(levels=("zone",), labels={"zone": "a"}),
    )
    body = encode_frame(newer)[4:]
    older = msgspec.msgpack.decode(body, type=DeltaBefore)
    assert older.paths == (PathReadingBefore(source="s", target="t", points=3, **COST),)


def test_an_older_agent_says_nothing_of_ages_and_classes():
    older = DeltaBefore(cursor=CURSOR, paths=(PathReadingBefore(source="s", target="t", **COST),))
    body = msgspec.msgpack.encode(older)
    (newer,) = FrameReader().feed(struct.pack(">I", len(body)) + body)
    assert newer.paths == (PathReading(source="s", target="t", age_seconds=0.0, **COST),)
    assert newer.path_classes is None


def test_what_is_not_known_takes_no_bytes():
    bare = encode_frame(Delta(cursor=CURSOR, paths=(PathReading(source="s", target="t", **COST),)))
    body = msgspec.msgpack.decode(bare[4:])
    assert "path_classes" not in body
    assert "age_seconds" not in body["paths"][0]
