"""Objects, their versions, and the events that changed them."""

import itertools
import time
import uuid
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from tests.doubles.api_server.resources import Resource

Json = dict[str, Any]
Key = tuple[str, str]


class ApiProblemError(Exception):
    """A request that is answered with a ``Status`` of failure."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Json | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = dict(details or {})
        self.retry_after_seconds = retry_after_seconds
        if retry_after_seconds is not None:
            self.details["retryAfterSeconds"] = retry_after_seconds

    def status(self) -> Json:
        """Return it as a ``Status`` object."""
        status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            status["details"] = self.details
        return status


@dataclass
class Stored:
    """One state of an object, never changed; encoded when first asked for."""

    resource: Resource
    value: Json
    version: int

    @cached_property
    def listed(self) -> bytes:
        """Its JSON in a list: built-in kinds come without kind and apiVersion there."""
        return msgspec.json.encode(self.value) if not self.resource.group else self.whole

    @cached_property
    def whole(self) -> bytes:
        """Its JSON by itself and in events."""
        head = {"kind": self.resource.kind, "apiVersion": self.resource.api_version}
        return msgspec.json.encode({**head, **self.value})

    @property
    def key(self) -> Key:
        """Namespace and name."""
        metadata = self.value["metadata"]
        return metadata.get("namespace", ""), metadata["name"]


@dataclass(frozen=True)
class Entry:
    """An event: the states before and after; ``after`` of a deletion is the last one."""

    version: int
    before: Stored | None
    after: Stored
    is_deletion: bool = False


@dataclass
class Snapshot:
    """What later pages of a list are cut from."""

    version: int
    rest: list[Stored]
    query: tuple[str, ...] = field(default=())


class ObjectStore:
    """All objects; each change gives the next version and tells the listeners."""

    def __init__(self, *, history_kept: int, snapshots_kept: int) -> None:
        self.version = 1
        self.listeners: set[Callable[[], None]] = set()
        self._objects: dict[Resource, dict[Key, Stored]] = {}
        self._history: dict[Resource, list[Entry]] = {}
        self._history_kept = history_kept
        self._oldest = 1
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._snapshots_kept = snapshots_kept
        self._tokens = itertools.count(1)

    def get(self, resource: Resource, key: Key) -> Stored:
        """Return an object; raises 404."""
        found = self._of(resource).get(key)
        if found is None:
            raise ApiProblemError(
                404,
                "NotFound",
                f'{resource.plural} "{key[1]}" not found',
                details={"name": key[1], "group": resource.group, "kind": resource.plural},
            )
        return found

    def find(self, resource: Resource, key: Key) -> Stored | None:
        """Return an object or nothing."""
        return self._of(resource).get(key)

    def all(self, resource: Resource, namespace: str = "") -> list[Stored]:
        """Return objects by namespace and name, as the API server lists them."""
        items = self._of(resource).items()
        return [item for key, item in sorted(items) if namespace in {"", key[0]}]

    def put(self, resource: Resource, value: Json) -> Stored:
        """Create or replace; an unchanged object keeps its version."""
        value = deepcopy(value)
        value.pop("kind", None)
        value.pop("apiVersion", None)
        metadata = value.setdefault("metadata", {})
        if resource.is_namespaced:
            metadata.setdefault("namespace", "default")
        before = self.find(resource, (metadata.get("namespace", ""), metadata["name"]))
        if before is not None:
            old = before.value["metadata"]
            metadata.update({name: old[name] for name in ("uid", "resourceVersion")})
            metadata.setdefault("creationTimestamp", old["creationTimestamp"])
            if value == before.value:
                return before
        else:
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", timestamp())
        return self._write(resource, before, value)

    def delete(self, resource: Resource, key: Key) -> Stored:
        """Remove an object; its event has a version of its own. Raises 404."""
        before = self.get(resource, key)
        after = self._next_state(resource, before.value)
        del self._of(resource)[key]
        self._remember(Entry(after.version, before, after, is_deletion=True))
        return after

    def _write(self, resource: Resource, before: Stored | None, value: Json) -> Stored:
        after = self._next_state(resource, value)
        self._of(resource)[after.key] = after
        self._remember(Entry(after.version, before, after))
        return after

    def _next_state(self, resource: Resource, value: Json) -> Stored:
        self.version += 1
        metadata = {**value["metadata"], "resourceVersion": str(self.version)}
        return Stored(resource, {**value, "metadata": metadata}, self.version)

    def _remember(self, entry: Entry) -> None:
        history = self._history.setdefault(entry.after.resource, [])
        history.append(entry)
        if len(history) > self._history_kept:
            self._oldest = max(self._oldest, history[-self._history_kept].version)
            del history[: -self._history_kept]
        self.tell()

    def tell(self) -> None:
        """Wake whoever follows."""
        for listener in tuple(self.listeners):
            listener()

    def entries_after(self, resource: Resource, version: int) -> Iterator[Entry]:
        """Yield the events after a version."""
        history = self._history.get(resource, [])
        start = bisect_right(history, version, key=lambda entry: entry.version)
        yield from history[start:]

    def is_gone(self, version: int) -> bool:
        """Whether a version is too old to begin a watch from."""
        return version < self._oldest

    def compact(self) -> None:
        """Forget the past: versions before now and the tokens of pages are gone (410)."""
        self._oldest = self.version
        self._history.clear()
        self._snapshots.clear()

    def go_back(self, version: int) -> None:
        """Be a store restored from a backup: versions run on from an earlier one."""
        self.compact()
        self.version = version
        self._oldest = 1

    def hold(self, snapshot: Snapshot) -> str:
        """Keep the rest of a list; return the token of its next page."""
        token = f"page-{next(self._tokens)}"
        self._snapshots[token] = snapshot
        while len(self._snapshots) > self._snapshots_kept:
            self._snapshots.popitem(last=False)
        return token

    def continued(self, token: str) -> Snapshot:
        """Return what a token stands for; raises 410 when it is too old."""
        found = self._snapshots.get(token)
        if found is None:
            raise expired("The provided continue parameter is too old to display a list result.")
        return found

    def _of(self, resource: Resource) -> dict[Key, Stored]:
        return self._objects.setdefault(resource, {})


def expired(message: str) -> ApiProblemError:
    """Return the problem of a version or token that is too old."""
    return ApiProblemError(410, "Expired", message)


def timestamp() -> str:
    """Return the present time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
