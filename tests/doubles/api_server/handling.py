"""Answering requests: who may, what is asked for, and each verb."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from tests.doubles.api_server import patches
from tests.doubles.api_server.config import ApiServerConfig
from tests.doubles.api_server.faults import Faults, FaultState
from tests.doubles.api_server.recording import RequestRecord, RequestSeen
from tests.doubles.api_server.resources import Target, parse_path
from tests.doubles.api_server.selecting import selector
from tests.doubles.api_server.store import ApiProblemError, Json, ObjectStore, Snapshot, Stored
from tests.doubles.api_server.streaming import WatchQuery, WatchStream

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_LONGEST_WATCH_SECONDS = 3600.0


class Policy:
    """Who may do what: tokens, and verbs by resource (``None`` allows all)."""

    def __init__(self, tokens: frozenset[str]) -> None:
        self.tokens = tokens
        self.allowed: Mapping[str, frozenset[str]] | None = None

    def check(self, seen: RequestSeen) -> None:
        """Raise 401 or 403."""
        if self.tokens and seen.authorization.removeprefix("Bearer ") not in self.tokens:
            raise ApiProblemError(401, "Unauthorized", "Unauthorized")
        verb, resource = seen.rule
        if self.allowed is not None and verb not in self.allowed.get(resource, frozenset()):
            message = f'{resource} is forbidden: User cannot {verb} resource "{resource}"'
            raise ApiProblemError(403, "Forbidden", message)


class ApiHandler:
    """Handles the requests of one double."""

    def __init__(
        self,
        config: ApiServerConfig,
        *,
        store: Callable[[], ObjectStore],
        policy: Policy,
        faults: FaultState,
        record: RequestRecord,
    ) -> None:
        self._config = config
        self._store_of = store
        self._policy = policy
        self._faults = faults
        self._record = record

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; every failure is a ``Status``."""
        target = parse_path(request.path, self._config.resources)
        seen = self._note(request, target)
        response: web.StreamResponse
        try:
            self._policy.check(seen)
            faults = self._faults.for_request(seen.verb, seen.resource)
            response = await self._faulty(faults) or await self._answer(
                request, target, seen, faults
            )
        except ApiProblemError as problem:
            response = _problem(problem)
        seen.status = response.status
        return response

    def _note(self, request: web.BaseRequest, target: Target | None) -> RequestSeen:
        query = dict(request.query)
        seen = RequestSeen(
            verb=_verb(request.method, target, query),
            method=request.method,
            path=request.path,
            query=query,
            resource=target.resource.plural if target else "",
            subresource=target.subresource if target else "",
            authorization=request.headers.get("Authorization", ""),
            user_agent=request.headers.get("User-Agent", ""),
            content_type=request.content_type,
            at=time.monotonic(),
        )
        self._record.add(seen)
        return seen

    async def _faulty(self, faults: Faults) -> web.StreamResponse | None:
        if faults.hang:
            await asyncio.Event().wait()
        if faults.status is not None:
            problem = ApiProblemError(
                faults.status,
                faults.reason or "Injected",
                "injected",
                retry_after_seconds=faults.retry_after_seconds,
            )
            answer = _problem(problem)
            if faults.location:
                answer.headers["Location"] = faults.location
            return answer
        if faults.body is not None:
            return web.Response(body=faults.body, content_type="application/json")
        return None

    async def _answer(
        self, request: web.BaseRequest, target: Target | None, seen: RequestSeen, faults: Faults
    ) -> web.StreamResponse:
        if target is None:
            raise ApiProblemError(404, "NotFound", "the server could not find the resource")
        if seen.verb == "watch":
            return await self._watch(request, target, seen, faults)
        if seen.verb == "list":
            body = self._list(target, seen.query)
        else:
            stored = await self._change(request, target, seen)
            body = stored.whole if isinstance(stored, Stored) else msgspec.json.encode(stored)
        seen.body_bytes = len(body)
        if faults.cut_after_bytes is not None:
            return await _cut(request, body, faults.cut_after_bytes)
        status = 201 if seen.verb == "create" else 200
        return web.Response(body=body, status=status, content_type="application/json")

    @property
    def _store(self) -> ObjectStore:
        return self._store_of()

    def _list(self, target: Target, query: dict[str, str]) -> bytes:
        version, rest = self._listed(target, query)
        limit = int(query.get("limit", "0"))
        if query.get("resourceVersion") == "0":
            limit = 0  # the watch cache makes no pages
        metadata: Json = {"resourceVersion": str(version)}
        if 0 < limit < len(rest):
            metadata["continue"] = self._store.hold(Snapshot(version, rest[limit:]))
            metadata["remainingItemCount"] = len(rest) - limit
            rest = rest[:limit]
        head = {
            "kind": target.resource.kind + "List",
            "apiVersion": target.resource.api_version,
            "metadata": metadata,
        }
        items = b",".join(item.listed for item in rest)
        return msgspec.json.encode(head)[:-1] + b',"items":[' + items + b"]}"

    def _listed(self, target: Target, query: dict[str, str]) -> tuple[int, list[Stored]]:
        token = query.get("continue", "")
        if token:
            snapshot = self._store.continued(token)
            return snapshot.version, snapshot.rest
        wanted = int(query.get("resourceVersion") or "0")
        if wanted > self._store.version:
            raise ApiProblemError(
                504,
                "Timeout",
                f"Too large resource version: {wanted}, current: {self._store.version}",
                retry_after_seconds=1,
                details={"causes": [{"reason": "ResourceVersionTooLarge"}]},
            )
        matches = _selector(query)
        every = self._store.all(target.resource, target.namespace)
        return self._store.version, [item for item in every if matches(item.value)]

    async def _watch(
        self, request: web.BaseRequest, target: Target, seen: RequestSeen, faults: Faults
    ) -> web.StreamResponse:
        query = seen.query
        watch = WatchQuery(
            target=target,
            matches=_selector(query),
            version=int(query.get("resourceVersion") or "0"),
            bookmarks=query.get("allowWatchBookmarks") in {"true", "1"},
            timeout_seconds=float(query.get("timeoutSeconds") or _LONGEST_WATCH_SECONDS),
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        seen.status = 200
        await response.prepare(request)
        stream = WatchStream(
            self._store,
            watch,
            faults=self._faults,
            bookmark_seconds=self._config.bookmark_seconds,
        )
        await stream.run(response, faults)
        return response

    async def _change(
        self, request: web.BaseRequest, target: Target, seen: RequestSeen
    ) -> Stored | Json:
        key = (target.namespace, target.name)
        if seen.verb == "get":
            return self._store.get(target.resource, key)
        if seen.verb == "delete":
            return self._store.delete(target.resource, key)
        body = _decode(await request.read())
        if seen.verb == "create":
            return self._create(target, body)
        if seen.verb == "update":
            return self._update(target, body)
        return self._patch(target, body, seen)

    def _create(self, target: Target, body: Json) -> Stored | Json:
        if target.subresource == "binding":
            self.bind(target, body["target"]["name"])
            return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}
        metadata = body.setdefault("metadata", {})
        if target.namespace:
            metadata["namespace"] = target.namespace
        if self._store.find(target.resource, (target.namespace, metadata["name"])):
            raise ApiProblemError(409, "AlreadyExists", f"{metadata['name']} already exists")
        return self._store.put(target.resource, body)

    def bind(self, target: Target, node: str) -> Stored:
        """Set a pod's node; raises 409 when it has one."""
        pod = self._store.get(target.resource, (target.namespace, target.name)).value
        if pod["spec"].get("nodeName"):
            message = f"pod {target.name} is already assigned to node {pod['spec']['nodeName']!r}"
            raise ApiProblemError(409, "Conflict", message)
        return self._store.put(target.resource, patches.merge(pod, {"spec": {"nodeName": node}}))

    def _update(self, target: Target, body: Json) -> Stored:
        before = self._store.get(target.resource, (target.namespace, target.name)).value
        given = body.get("metadata", {}).get("resourceVersion")
        if given not in {None, before["metadata"]["resourceVersion"]}:
            raise ApiProblemError(409, "Conflict", "the object has been modified")
        return self._store.put(target.resource, _part(before, body, target.subresource))

    def _patch(self, target: Target, body: Json, seen: RequestSeen) -> Stored:
        key = (target.namespace, target.name)
        if seen.content_type == "application/merge-patch+json":
            before = self._store.get(target.resource, key).value
            after = patches.merge(before, body)
        elif seen.content_type == "application/apply-patch+yaml":
            before, after = self._applied(target, body, seen)
        else:
            message = f"the body of the request was in an unknown format: {seen.content_type}"
            raise ApiProblemError(415, "UnsupportedMediaType", message)
        return self._store.put(target.resource, _part(before, after, target.subresource))

    def _applied(self, target: Target, body: Json, seen: RequestSeen) -> tuple[Json, Json]:
        manager = seen.query.get("fieldManager", "")
        if not manager:
            raise ApiProblemError(400, "BadRequest", "fieldManager is required for apply patch")
        found = self._store.find(target.resource, (target.namespace, target.name))
        if found is None and target.subresource:
            self._store.get(target.resource, (target.namespace, target.name))
        metadata = {"name": target.name}
        if target.namespace:
            metadata["namespace"] = target.namespace
        before: Json = found.value if found else {"metadata": metadata}
        after = patches.apply(
            before,
            body,
            manager=manager,
            force=seen.query.get("force") == "true",
            subresource=target.subresource,
        )
        return before, after


def _verb(method: str, target: Target | None, query: dict[str, str]) -> str:
    if method != "GET":
        return _VERBS.get(method, method.lower())
    if target is None or target.name:
        return "get"
    return "watch" if query.get("watch") in {"true", "1"} else "list"


def _part(before: Json, after: Json, subresource: str) -> Json:
    """Return what a request may change: all but the status, or with ``/status`` only that."""
    if subresource not in {"", "status"}:
        raise ApiProblemError(404, "NotFound", f"there is no {subresource}")
    result = {**before, "status": after.get("status")} if subresource else dict(after)
    if subresource:
        managed = after["metadata"].get("managedFields")
        if managed is not None:
            result["metadata"] = {**before["metadata"], "managedFields": managed}
    else:
        result["status"] = before.get("status")
    if result["status"] is None:
        del result["status"]
    return result


def _selector(query: dict[str, str]) -> Callable[[Json], bool]:
    try:
        return selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
    except ValueError as error:
        raise ApiProblemError(400, "BadRequest", str(error)) from error


def _decode(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ApiProblemError(400, "BadRequest", f"cannot read the body: {error}") from error


def _problem(problem: ApiProblemError) -> web.Response:
    headers = {}
    if problem.retry_after_seconds is not None:
        headers["Retry-After"] = str(problem.retry_after_seconds)
    return web.Response(
        body=msgspec.json.encode(problem.status()),
        status=problem.code,
        headers=headers,
        content_type="application/json",
    )


async def _cut(request: web.BaseRequest, body: bytes, after_bytes: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(request)
    await response.write(body[:after_bytes])
    if request.transport is not None:
        request.transport.close()
    return response
