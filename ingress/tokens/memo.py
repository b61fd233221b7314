"""What was tokenized before (pure): whole prompts, and prefixes of long texts.

Two memories, each bounded in bytes and dropping what was used least recently:

- ``PromptMemo``: digest of everything that bears on the tokens -> block keys.
- ``PrefixMemo``: long prompt texts with their tokens and alignment. A new text that starts
  like one of them needs only its tail tokenized. Texts are found by a chain of hashes over
  fixed steps, deepest first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from nearkv.block_keys import TOKEN_BYTES
from nearkv.ingress.tokens.alignment import find_cut

STEP_BYTES = 1024
"""Texts shorter than two steps are not worth remembering by prefix."""
_ENTRY_BYTES = 1000
_BYTES_PER_KEY = 8
_BYTES_PER_STEP = 120


class PromptKeys(msgspec.Struct, frozen=True):
    """A tokenized prompt: its length, and the keys of its full blocks (an ``array('Q')``).

    ``source`` says where the tokens came from: render, tokenize, local, memo, prefix, ids.
    ``exact`` says that the engine sees these tokens; else they are a guess that need not
    come true.
    """

    token_count: int
    keys: Sequence[int]
    source: str
    exact: bool = True


class PromptMemo:
    """Prompts seen before, by digest."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._of: OrderedDict[bytes, PromptKeys] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Estimated memory held."""
        return self._bytes

    def get(self, digest: bytes) -> PromptKeys | None:
        """Return the keys of a prompt seen before."""
        found = self._of.get(digest)
        if found is not None:
            self._of.move_to_end(digest)
        return found

    def put(self, digest: bytes, prompt: PromptKeys) -> None:
        """Remember a prompt."""
        if digest in self._of:
            return
        self._of[digest] = prompt
        self._bytes += _prompt_bytes(prompt)
        while self._bytes > self._limit_bytes and self._of:
            _, dropped = self._of.popitem(last=False)
            self._bytes -= _prompt_bytes(dropped)


def _prompt_bytes(prompt: PromptKeys) -> int:
    return _ENTRY_BYTES + len(prompt.keys) * _BYTES_PER_KEY


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """A long text with its tokens, where each ends, and the keys of its full blocks."""

    text: bytes
    packed_tokens: bytes
    ends: "array[int]"
    root: int
    block_size: int
    keys: Sequence[int]
    steps: Sequence[int]

    @property
    def size_bytes(self) -> int:
        """Estimated memory held."""
        return (
            _ENTRY_BYTES
            + len(self.text)
            + len(self.packed_tokens)
            + len(self.ends) * self.ends.itemsize
            + len(self.keys) * _BYTES_PER_KEY
            + len(self.steps) * _BYTES_PER_STEP
        )


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The part of a new text that is tokenized already: its tokens, and where the rest starts."""

    entry: TokenizedText
    token_count: int
    text_bytes: int

    @property
    def packed_tokens(self) -> bytes:
        """The tokens of the known part."""
        return self.entry.packed_tokens[: self.token_count * TOKEN_BYTES]


def step_hashes(scope: int, text: bytes) -> list[int]:
    """Return a chain of hashes over whole steps of ``text``; ``scope`` keeps models apart."""
    hashes = []
    for start in range(0, len(text) - STEP_BYTES + 1, STEP_BYTES):
        scope = xxh3_64_intdigest(text[start : start + STEP_BYTES], scope)
        hashes.append(scope)
    return hashes


class PrefixMemo:
    """Long texts seen before, found by their beginnings."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._entries: OrderedDict[int, TokenizedText] = OrderedDict()
        self._at: dict[int, tuple[TokenizedText, int]] = {}

    @property
    def size_bytes(self) -> int:
        """Estimated memory held."""
        return self._bytes

    def find(self, text: bytes, steps: Sequence[int]) -> KnownPrefix | None:
        """Return the longest known part of a text, cut where cutting is safe."""
        for step in reversed(steps):
            hit = self._at.get(step)
            if hit is None:
                continue
            entry, known_bytes = hit
            # A cut looks one byte ahead, which must be known too.
            count = find_cut(text, entry.ends, known_bytes - 2)
            if count is None:
                return None
            self._entries.move_to_end(id(entry))
            return KnownPrefix(entry, count, entry.ends[count - 1])
        return None

    def put(self, entry: TokenizedText, extends: TokenizedText | None = None) -> None:
        """Remember a text; one that it begins with whole is no longer needed."""
        if extends is not None and entry.text.startswith(extends.text):
            self._drop(extends)
        self._entries[id(entry)] = entry
        self._bytes += entry.size_bytes
        for i, step in enumerate(entry.steps):
            self._at[step] = (entry, (i + 1) * STEP_BYTES)
        while self._bytes > self._limit_bytes and self._entries:
            self._drop(next(iter(self._entries.values())))

    def _drop(self, entry: TokenizedText) -> None:
        if self._entries.pop(id(entry), None) is None:
            return
        self._bytes -= entry.size_bytes
        for step in entry.steps:
            held = self._at.get(step)
            if held is not None and held[0] is entry:
                del self._at[step]
