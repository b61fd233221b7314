"""The endpoints for people: ``/v1/explain`` and ``/v1/topology``."""

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from nearkv.extender.api import error_response
from nearkv.extender.decisions import Decision, Decisions, Document
from nearkv.extender.errors import NotKnownError, QueryError
from nearkv.extender.model import Snapshot

_MOST_NODES = 20_000
_USUAL_NODES = 20
_MOST_DECISIONS = 5


class QuestionApi:
    """Handlers for people and for ``nearkv explain-pod``; ``now`` is monotonic seconds."""

    def __init__(
        self,
        *,
        decisions: Decisions,
        snapshot: Callable[[], Snapshot | None],
        describe: Callable[[Snapshot, float], Document],
        now: Callable[[], float],
    ) -> None:
        self._decisions = decisions
        self._snapshot = snapshot
        self._describe = describe
        self._now = now

    async def explain(self, request: web.Request) -> web.Response:
        """Answer the last decisions about a pod, latest first.

        ``?pod=namespace/name`` or ``?uid=``; ``?limit=`` is the number of nodes to show.
        """
        try:
            found = self._find(request)
            limit = _read_limit(request)
        except QueryError as error:
            return error_response(error.status, str(error), reason="query")
        return _json(
            {
                "pod": found[0].pod,
                "uid": found[0].uid,
                "decisions": [_describe(decision, limit) for decision in found],
            }
        )

    async def topology(self, _request: web.Request) -> web.Response:
        """Answer the levels of distance, what was measured, and where each group is."""
        snapshot = self._snapshot()
        if snapshot is None:
            return error_response(
                503,
                "nothing is known of the cluster yet; see /readyz?verbose",
                reason="no_snapshot",
            )
        return _json(self._describe(snapshot, self._now()))

    def _find(self, request: web.Request) -> list[Decision]:
        pod, uid = request.query.get("pod", ""), request.query.get("uid", "")
        if bool(pod) == bool(uid):
            raise QueryError("give one of pod=namespace/name and uid=")
        if pod and len(pod.split("/")) != len(("namespace", "name")):
            raise QueryError(f"pod: expected namespace/name, got {pod[:80]!r}")
        found = []
        for decision in self._decisions.latest(pod=pod, uid=uid):
            found.append(decision)
            if len(found) == _MOST_DECISIONS:
                break
        if not found:
            raise NotKnownError(
                f"no decision about {(pod or uid)[:300]} is kept: this replica was not asked "
                "about it, it has no group label, or others have come since (decisions.max_count)"
            )
        return found


def _read_limit(request: web.Request) -> int:
    text = request.query.get("limit", str(_USUAL_NODES))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < len("1000000") else 0
    if not 1 <= limit <= _MOST_NODES:
        raise QueryError(f"limit: expected 1 to {_MOST_NODES}, got {text[:20]!r}")
    return limit


def _describe(decision: Decision, limit: int) -> Document:
    when = datetime.fromtimestamp(decision.at, UTC).isoformat(timespec="milliseconds")
    return {"verb": decision.verb, "at": when, **decision.describe(limit)}


def _json(document: Document) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
