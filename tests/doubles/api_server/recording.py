"""What was asked of the double, for assertions."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class RequestSeen:
    """One request: what was asked, by whom, how it was answered."""

    verb: str
    method: str
    path: str
    query: dict[str, str]
    resource: str = ""
    subresource: str = ""
    authorization: str = ""
    user_agent: str = ""
    content_type: str = ""
    status: int = 0
    body_bytes: int = 0
    at: float = 0.0

    @property
    def rule(self) -> tuple[str, str]:
        """Verb and resource as RBAC knows them, ``workerstatuses/status`` for one."""
        part = f"/{self.subresource}" if self.subresource else ""
        return self.verb, self.resource + part


@dataclass
class RequestRecord:
    """The last requests, oldest first."""

    kept: int
    _seen: deque[RequestSeen] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = deque(maxlen=self.kept)

    def add(self, request: RequestSeen) -> None:
        """Keep one."""
        self._seen.append(request)

    def clear(self) -> None:
        """Forget all."""
        self._seen.clear()

    def all(self, verb: str = "", resource: str = "") -> list[RequestSeen]:
        """Return those with a verb and on a resource (plural), all without."""
        return [
            seen
            for seen in self._seen
            if verb in {"", seen.verb} and resource in {"", seen.resource}
        ]

    @property
    def rules(self) -> set[tuple[str, str]]:
        """Every (verb, resource) that was asked for: what RBAC must grant, and no more."""
        return {seen.rule for seen in self._seen}

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[RequestSeen]:
        return iter(tuple(self._seen))
