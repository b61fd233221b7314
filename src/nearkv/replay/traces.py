"""Reading what is replayed: public traces, and the ingress's own decision records.

A public trace is one JSON object a line: ``timestamp`` (ms), ``input_length`` and
``output_length`` (tokens), ``hash_ids`` (one for each block of the prompt; equal ids stand for
equal prefixes). The ingress's file (``decisions.file``) has the same under its own names, if it
was told to keep keys; one that lacks them cannot be replayed.
"""

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from nearkv.replay.errors import ReplayError

PUBLIC_BLOCK_TOKENS = 512
_MS = 1000.0
_WORDS = struct.Struct("<2Q")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; ``keys`` are those of its full blocks, ``at`` is in seconds."""

    at: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    arrivals: Sequence[Arrival]
    block_tokens: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at if self.arrivals else 0.0


class PublicLine(msgspec.Struct):
    """A line of a public trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class RecordLine(msgspec.Struct):
    """What a replay needs of a line that the ingress wrote; the rest is not looked at."""

    at_seconds: float
    model: str = ""
    session: str = ""
    priority: int = 0
    prompt_tokens: int | None = None
    block_tokens: int | None = None
    output_tokens: int | None = None
    output_chunks: int | None = None
    hash_ids: list[int] | None = None


_public = msgspec.json.Decoder(PublicLine)
_record = msgspec.json.Decoder(RecordLine)
_names = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_trace(path: Path, *, block_tokens: int | None = None, model: str | None = None) -> Trace:
    """Read a trace of either kind; raises :class:`ReplayError` naming file, line and field.

    ``block_tokens`` says how many tokens one of a public trace's ids stands for, 512 if left
    out; decision records say it themselves. ``model`` chooses from records of several models.
    """
    try:
        with path.open("rb") as lines:
            return parse_trace(lines, name=path.name, block_tokens=block_tokens, model=model)
    except OSError as error:
        raise ReplayError(f"trace: cannot read {path}: {error.strerror}") from error


def parse_trace(
    lines: Iterable[bytes], *, name: str, block_tokens: int | None = None, model: str | None = None
) -> Trace:
    """Parse the lines of a trace; see :func:`read_trace`."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ReplayError(f"trace: {name} is empty")
    if _is_public(name, *numbered[0]):
        tokens = block_tokens or PUBLIC_BLOCK_TOKENS
        arrivals = [_public_arrival(name, *line, block_tokens=tokens) for line in numbered]
    else:
        tokens, arrivals = _recorded(name, _records(name, numbered, model))
    arrivals.sort(key=lambda arrival: arrival.at)
    start = arrivals[0].at
    return Trace(name, [replace(a, at=a.at - start) for a in arrivals], tokens)


def _is_public(name: str, number: int, line: bytes) -> bool:
    try:
        fields = _names.decode(line)
    except msgspec.DecodeError as error:
        raise ReplayError(f"trace: {name}, line {number}: not a JSON object: {error}") from error
    if "input_length" in fields:
        return True
    if "at_seconds" in fields:
        return False
    raise ReplayError(
        f"trace: {name}, line {number}: neither a public trace (timestamp, input_length, "
        "output_length, hash_ids) nor the ingress's decision records"
    )


def _public_arrival(name: str, number: int, line: bytes, *, block_tokens: int) -> Arrival:
    try:
        read = _public.decode(line)
    except msgspec.DecodeError as error:
        raise ReplayError(f"trace: {name}, line {number}: {error}") from error
    if read.input_length < 1 or read.output_length < 0:
        raise ReplayError(f"trace: {name}, line {number}: input_length or output_length too small")
    blocks = read.input_length // block_tokens
    if len(read.hash_ids) < blocks:
        raise ReplayError(
            f"trace: {name}, line {number}: hash_ids has {len(read.hash_ids)} ids, a prompt of "
            f"{read.input_length} tokens has {blocks} full blocks of {block_tokens} "
            "(another --block-tokens?)"
        )
    keys = chain_ids(read.hash_ids[:blocks])
    return Arrival(read.timestamp / _MS, read.input_length, max(1, read.output_length), keys)


def _records(
    name: str, numbered: Sequence[tuple[int, bytes]], model: str | None
) -> list[RecordLine]:
    """Return the records of one model, those of requests that were tokenized."""
    records = []
    for number, line in numbered:
        try:
            read = _record.decode(line)
        except msgspec.DecodeError as error:
            raise ReplayError(f"trace: {name}, line {number}: {error}") from error
        if read.prompt_tokens and (model is None or read.model == model):
            records.append(read)
    models = sorted({record.model for record in records})
    if len(models) > 1:
        raise ReplayError(f"trace: {name} has several models, choose by --model: {models}")
    if not records:
        raise ReplayError(
            f"trace: {name} has no record with prompt_tokens"
            + (f" of model {model!r}" if model is not None else "")
        )
    return records


def _recorded(name: str, records: Sequence[RecordLine]) -> tuple[int, list[Arrival]]:
    """Return the block size and the requests of decision records.

    Where an answer's length was not seen, it is taken for a usual one.
    """
    keyed = [record for record in records if record.hash_ids is not None and record.block_tokens]
    if not keyed:
        raise ReplayError(
            f"trace: none of the {len(records)} records in {name} has hash_ids: set "
            "decisions.keys: true at the ingress and record again"
        )
    sizes = sorted({record.block_tokens or 0 for record in keyed})
    if len(sizes) > 1:
        raise ReplayError(f"trace: {name} mixes block sizes: {sizes}")
    lengths = sorted(filter(None, (r.output_tokens or r.output_chunks for r in keyed)))
    usual = lengths[len(lengths) // 2] if lengths else 1
    arrivals = [
        Arrival(
            record.at_seconds,
            record.prompt_tokens or 1,
            record.output_tokens or record.output_chunks or usual,
            chain_ids((record.hash_ids or ())[: (record.prompt_tokens or 0) // sizes[0]]),
            session=record.session,
            priority=record.priority,
        )
        for record in keyed
    ]
    return sizes[0], arrivals


def chain_ids(ids: Sequence[int]) -> list[int]:
    """Return keys that name whole prefixes, as well spread as our block keys are."""
    parent = 0
    keys = []
    for number in ids:
        parent = xxh3_64_intdigest(_WORDS.pack(parent, number % (1 << 64)))
        keys.append(parent)
    return keys


def spread(trace: Trace, seed: int) -> Trace:
    """Spread requests of one timestamp over the time to the next one.

    Public traces are rounded, to three seconds for instance: nobody sent these at once.
    """
    times = sorted({arrival.at for arrival in trace.arrivals})
    gaps = {now: later - now for now, later in pairwise(times)}
    usual = sorted(gaps.values())[len(gaps) // 2] if gaps else 0.0
    chance = random.Random(seed)  # noqa: S311 (a simulation, not a secret)
    moved = [
        replace(a, at=a.at + chance.random() * min(gaps.get(a.at, usual), usual))
        for a in trace.arrivals
    ]
    moved.sort(key=lambda arrival: arrival.at)
    return replace(trace, arrivals=moved)


def scaled(trace: Trace, rate: float) -> Trace:
    """Return a trace that comes ``rate`` times as fast."""
    return replace(trace, arrivals=[replace(a, at=a.at / rate) for a in trace.arrivals])


def without_sharing(trace: Trace) -> Trace:
    """Return a trace of the same requests in which no two have a block in common."""
    arrivals = [
        replace(a, keys=chain_ids([number, *range(1, len(a.keys))]) if a.keys else ())
        for number, a in enumerate(trace.arrivals)
    ]
    return replace(trace, arrivals=arrivals)
