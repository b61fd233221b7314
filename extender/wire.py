"""What kube-scheduler and an extender say to each other (pure): JSON in, JSON out.

Field names are those of Go structs without tags (``k8s.io/kube-scheduler/extender/v1``), hence
capitalised. A request carries names (``nodeCacheCapable: true``) or whole Node objects; either
is understood on every request, and the answer has the form of the request.

Whole nodes are up to 20 kB each. Only their names are decoded; answers to filter repeat the
objects byte for byte from the request, without decoding or copying them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec
import numpy as np

from nearkv.extender.errors import BadRequestError
from nearkv.extender.model import Ints
from nearkv.kube.objects import Pod

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_NULL = b"null"
_HIGHEST_SCORE = 100
_JOINED_BYTES = 1 << 18
"""Answers are handed to the transport in pieces of about this size."""


class Mode(StrEnum):
    """How a request names its nodes, and so how it wants to be answered."""

    NAMES = "names"
    NODES = "nodes"


class Arguments(msgspec.Struct, frozen=True):
    """The body of filter and prioritize; Go writes the list that is not used as ``null``."""

    pod: Pod = msgspec.field(name="Pod")
    nodes: msgspec.Raw = msgspec.field(name="Nodes", default=msgspec.Raw(_NULL))
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)


class _NamedMeta(msgspec.Struct, frozen=True):
    name: str


class _NamedNode(msgspec.Struct, frozen=True):
    metadata: _NamedMeta


class _NamedNodes(msgspec.Struct, frozen=True):
    items: list[_NamedNode] | None = None


class _RawNodes(msgspec.Struct, frozen=True):
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    items: list[msgspec.Raw] | None = None


class _FilterResult(msgspec.Struct, frozen=True):
    """The answer to filter in names mode; a non-empty ``Error`` would fail the pod."""

    nodes: None = msgspec.field(name="Nodes", default=None)
    node_names: Sequence[str] = msgspec.field(name="NodeNames", default=())
    failed: Mapping[str, str] = msgspec.field(name="FailedNodes", default_factory=dict)
    unresolvable: Mapping[str, str] = msgspec.field(
        name="FailedAndUnresolvableNodes", default_factory=dict
    )
    error: str = msgspec.field(name="Error", default="")


@dataclass(frozen=True, slots=True)
class Question:
    """A request that was understood; ``raw_nodes`` is the NodeList as it came, in nodes mode."""

    mode: Mode
    pod: Pod
    names: list[str]
    raw_nodes: memoryview | None = None


def read_json(decoder: "msgspec.json.Decoder[T]", body: Buffer, *, what: str) -> T:
    """Decode a body; raises :class:`BadRequestError`, whose message names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{what}: {error}", reason="wrong_type") from error
    except msgspec.DecodeError as error:
        raise BadRequestError(f"{what} is not JSON: {error}", reason="not_json") from error
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{what} is not UTF-8: {error.reason}", reason="not_utf8") from error
    except RecursionError as error:
        raise BadRequestError(f"{what} is nested too deeply", reason="too_deep") from error


class Wire:
    """Reads requests and writes answers; one for a process, since decoders are made once."""

    def __init__(self, *, max_hosts: int = 1 << 17) -> None:
        self._arguments = msgspec.json.Decoder(Arguments)
        self._named_nodes = msgspec.json.Decoder(_NamedNodes)
        self._raw_nodes = msgspec.json.Decoder(_RawNodes)
        self._filter_result = msgspec.json.Encoder()
        self._hosts = _Hosts(max_hosts)
        self._tails = np.array([b"%d}," % score for score in range(_HIGHEST_SCORE + 1)], object)

    def read(self, body: Buffer) -> Question:
        """Understand the body of filter or prioritize; raises :class:`BadRequestError`."""
        given = read_json(self._arguments, body, what="the body")
        nodes = memoryview(given.nodes)
        if given.node_names is not None:
            if nodes != _NULL:
                raise BadRequestError(
                    "both Nodes and NodeNames are given; one of them has to be null",
                    reason="both_modes",
                )
            return Question(Mode.NAMES, given.pod, given.node_names)
        if nodes == _NULL:
            raise BadRequestError(
                "neither Nodes nor NodeNames is given; nothing is left to answer about",
                reason="no_nodes",
            )
        named = read_json(self._named_nodes, nodes, what="Nodes")
        names = [node.metadata.name for node in named.items or ()]
        return Question(Mode.NODES, given.pod, names, nodes)

    def scores(self, nodes: Sequence[str], scores: Ints) -> bytes:
        """Write a HostPriorityList. Scores are whole numbers: a float would void them all.

        Each score, 0 to 100, closes its object and opens the next; the last one opens nothing.
        """
        if not nodes:
            return b"[]"
        pieces = [b""] * (2 * len(nodes))
        pieces[0::2] = self._hosts.of(nodes)
        pieces[1::2] = self._tails[np.clip(scores, 0, _HIGHEST_SCORE)].tolist()
        pieces[-1] = pieces[-1][:-1] + b"]"
        return b"[" + b"".join(pieces)

    def filtered(
        self,
        question: Question,
        *,
        kept: Sequence[str],
        failed: Mapping[str, str],
        unresolvable: Mapping[str, str],
    ) -> Iterator[Buffer]:
        """Write an ExtenderFilterResult in the mode asked, in pieces that may be large."""
        if question.raw_nodes is None:
            result = _FilterResult(node_names=kept, failed=failed, unresolvable=unresolvable)
            yield self._filter_result.encode(result)
            return
        encode = self._filter_result.encode
        end = b',"NodeNames":null,"FailedNodes":%b,"FailedAndUnresolvableNodes":%b,"Error":""}' % (
            encode(failed),
            encode(unresolvable),
        )
        yield b'{"Nodes":'
        if not failed and not unresolvable:
            yield question.raw_nodes
        else:
            yield from self._survivors(question, failed.keys() | unresolvable.keys())
        yield end

    def _survivors(self, question: Question, dropped: set[str]) -> Iterator[Buffer]:
        assert question.raw_nodes is not None  # noqa: S101 (says it to the type checker)
        nodes = self._raw_nodes.decode(question.raw_nodes)
        survivors = [
            item
            for item, name in zip(nodes.items or (), question.names, strict=True)
            if name not in dropped
        ]
        yield b'{"metadata":%b,"items":[' % nodes.metadata
        comma, batch, size = b"", list[Buffer](), 0
        for item in survivors:
            view = memoryview(item)
            batch += (comma, view)
            comma = b","
            size += len(view)
            if size >= _JOINED_BYTES:
                yield b"".join(batch)
                batch, size = [], 0
        yield b"".join([*batch, b"]}"])


class _Hosts:
    """``"Host":…`` by node name, written once for a node.

    Bounded, since names come from outside: a cluster has fewer, so too many were not real.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._written: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._written)

    def of(self, nodes: Sequence[str]) -> list[bytes]:
        """Return what is written for each node."""
        written = self._written
        try:
            return [written[node] for node in nodes]
        except KeyError:
            return self._with_new_ones(nodes)

    def _with_new_ones(self, nodes: Sequence[str]) -> list[bytes]:
        written = self._written
        for node in nodes:
            if node not in written:
                written[node] = b'{"Host":%b,"Score":' % msgspec.json.encode(node)
        found = [written[node] for node in nodes]
        if len(written) > self._most:
            written.clear()
        return found
