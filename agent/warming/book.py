"""The prefixes that were named, and how their loading stands (pure)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nearkv.agent.warming.errors import (
    BadWarmRequestError,
    PrefixConflictError,
    UnknownPrefixError,
    WarmingFullError,
)
from nearkv.agent.warming.requests import WarmRequest

_BYTES_PER_TOKEN = 36
_BYTES_PER_PREFIX = 2000


class LoadState(StrEnum):
    """How loading one prefix into one engine stands."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_UNDER_WAY = (LoadState.WAITING, LoadState.LOADING)


@dataclass(slots=True)
class Target:
    """One engine that a prefix is for; ``error`` says why it failed."""

    engine: str
    state: LoadState = LoadState.WAITING
    incarnation: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""


@dataclass(slots=True)
class Prefix:
    """A named prefix.

    ``token_ids`` (by model) and ``keys`` (by engine) are known once it was tokenized;
    ``resident`` is the share that each engine holds, and as of which version.
    """

    id: str
    request: WarmRequest
    digest: str
    size_bytes: int
    targets: dict[str, Target] = field(default_factory=dict)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    resident: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that a prefix may be loaded into."""

    id: str
    group: str
    names: tuple[str, ...]


def choose_engines(request: WarmRequest, candidates: Iterable[Candidate]) -> list[str]:
    """Return the engines that a request speaks of; raises :class:`BadWarmRequestError`."""
    known = {candidate.id: candidate for candidate in candidates}
    if request.engines is not None:
        missing = [engine for engine in request.engines if engine not in known]
        if missing:
            raise BadWarmRequestError(
                f"engines: {', '.join(missing)[:200]}: not on this node; "
                f"known: {', '.join(sorted(known)) or 'none'}"
            )
        chosen = [known[engine] for engine in dict.fromkeys(request.engines)]
    else:
        chosen = [c for c in known.values() if request.group in (None, c.group)]
    if request.model is not None:
        chosen = [c for c in chosen if request.model in c.names]
    if not chosen:
        raise BadWarmRequestError("no engine of this node has that group, or serves that model")
    return [candidate.id for candidate in chosen]


class WarmBook:
    """All named prefixes, bounded in number and in memory."""

    def __init__(self, *, max_prefixes: int, max_bytes: int) -> None:
        self._max_prefixes = max_prefixes
        self._max_bytes = max_bytes
        self._bytes = 0
        self._prefixes: dict[str, Prefix] = {}

    def __iter__(self) -> Iterator[Prefix]:
        """Go through all prefixes, the oldest first."""
        return iter(self._prefixes.values())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._prefixes)

    @property
    def size_bytes(self) -> int:
        """Memory of their texts and tokens."""
        return self._bytes

    def get(self, prefix_id: str) -> Prefix:
        """Return a prefix; raises :class:`UnknownPrefixError`."""
        prefix = self._prefixes.get(prefix_id)
        if prefix is None:
            raise UnknownPrefixError(f"no prefix has the id {prefix_id[:80]!r}")
        return prefix

    def put(self, prefix_id: str, request: WarmRequest, body_bytes: int) -> Prefix:
        """Return the prefix of this id, new or known.

        Raises :class:`PrefixConflictError` and :class:`WarmingFullError`.
        """
        digest = request.digest
        known = self._prefixes.get(prefix_id)
        if known is not None:
            if known.digest != digest:
                raise PrefixConflictError(
                    f"{prefix_id}: stands for another prefix; DELETE /v1/prefixes/{prefix_id} first"
                )
            return known
        # Tokens take about as many bytes as the text they come from, nine times over in Python.
        tokens = len(request.token_ids or ()) or body_bytes // 4
        size_bytes = _BYTES_PER_PREFIX + body_bytes + tokens * _BYTES_PER_TOKEN
        if len(self._prefixes) >= self._max_prefixes:
            raise WarmingFullError(f"{self._max_prefixes} prefixes are kept; delete some")
        if self._bytes + size_bytes > self._max_bytes:
            raise WarmingFullError(f"the prefixes kept would take over {self._max_bytes} bytes")
        self._bytes += size_bytes
        prefix = self._prefixes[prefix_id] = Prefix(prefix_id, request, digest, size_bytes)
        return prefix

    def drop(self, prefix_id: str) -> Prefix:
        """Forget a prefix; raises :class:`UnknownPrefixError`."""
        prefix = self.get(prefix_id)
        del self._prefixes[prefix_id]
        self._bytes -= prefix.size_bytes
        return prefix


def targets_to_load(
    prefix: Prefix, engines: Iterable[str], incarnations: Mapping[str, str], held: Iterable[str]
) -> list[Target]:
    """Return what there is to do, and note it: nothing for what is under way, or held already.

    ``held`` are the engines that hold the whole prefix now.
    """
    holding = set(held)
    wanted = []
    for engine in engines:
        target = prefix.targets.get(engine)
        if target is not None and target.state in _UNDER_WAY:
            continue
        is_same = target is not None and target.incarnation == incarnations.get(engine)
        is_loaded = is_same and target is not None and target.state is LoadState.LOADED
        if is_loaded and (engine in holding or engine not in prefix.keys):
            continue
        target = prefix.targets[engine] = Target(engine, incarnation=incarnations.get(engine, ""))
        wanted.append(target)
    return wanted


def describe(prefix: Prefix, resident_ratio: Mapping[str, float], uses: int) -> dict[str, Any]:
    """Return a prefix as plain JSON types."""
    return {
        "id": prefix.id,
        "tokens": max((len(ids) for ids in prefix.token_ids.values()), default=None),
        "uses": uses,
        "engines": [
            {
                "id": target.engine,
                "state": target.state.value,
                "resident_ratio": resident_ratio.get(target.engine),
                "prompt_tokens": target.prompt_tokens,
                "cached_tokens": target.cached_tokens,
                "error": target.error or None,
            }
            for target in prefix.targets.values()
        ],
    }
