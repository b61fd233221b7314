"""The double as one object: start, stop, restart, kill; objects, faults, what was asked."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from tests.doubles.api_server import patches
from tests.doubles.api_server.config import ApiServerConfig
from tests.doubles.api_server.faults import Faults, FaultState
from tests.doubles.api_server.handling import ApiHandler, Policy
from tests.doubles.api_server.recording import RequestRecord
from tests.doubles.api_server.resources import PODS, Resource, Target
from tests.doubles.api_server.store import Json, ObjectStore, timestamp

_BIND_RETRY_SECONDS = 0.01
_SHUTDOWN_SECONDS = 1.0
_MAX_BODY_BYTES = 3 << 20


class ApiServerDouble:
    """A stand-in for one API server; use as ``async with ApiServerDouble() as api``.

    Objects are dictionaries as in YAML, with ``kind``. They outlive :meth:`restart`, as they do
    in etcd; the port stays, too.
    """

    def __init__(self, config: ApiServerConfig | None = None) -> None:
        self.config = config or ApiServerConfig()
        self.record = RequestRecord(self.config.requests_kept)
        self._store = ObjectStore(
            history_kept=self.config.history_kept, snapshots_kept=self.config.snapshots_kept
        )
        self._faults = FaultState()
        self._policy = Policy(self.config.tokens)
        self._port = self.config.port
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._handler = ApiHandler(
            self.config,
            store=lambda: self._store,
            policy=self._policy,
            faults=self._faults,
            record=self.record,
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Base URL without a path; valid after the first start."""
        scheme = "https" if self.config.tls else "http"
        return f"{scheme}://{self.config.host}:{self._port}"

    @property
    def version(self) -> str:
        """The present resource version."""
        return str(self._store.version)

    @property
    def open_watches(self) -> int:
        """How many watches are open and were not refused."""
        return len(self._store.listeners)

    async def start(self) -> None:
        """Listen, on the port of last time; raises ``OSError`` when that stays taken."""
        if self._server is not None:
            raise RuntimeError("the API server double runs already")
        self._server = web.Server(
            self._handler.handle,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
        )
        await self._listen(self._server)

    async def stop(self) -> None:
        """Stop serving and wait until nothing is left; harmless when stopped."""
        server = self._server
        self.kill()
        if server is not None:
            await server.shutdown(_SHUTDOWN_SECONDS)

    def kill(self) -> None:
        """Crash: the port closes and every connection breaks, at once."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.break_connections()
        self._server = None

    async def restart(self) -> None:
        """Crash and start again on the same port, with the same objects."""
        await self.stop()
        await self.start()

    def break_connections(self) -> None:
        """Break every open connection; the port stays open."""
        for connection in self._server.connections if self._server else ():
            if connection.transport is not None:
                connection.transport.abort()

    def put(self, value: Json) -> Json:
        """Create or replace an object; return it with its metadata filled in."""
        return self._store.put(self._resource(value["kind"]), value).value

    def put_all(self, values: Iterable[Json]) -> None:
        """Create or replace objects."""
        for value in values:
            self.put(value)

    def get(self, kind: str, name: str, namespace: str = "default") -> Json:
        """Return an object; raises ``ApiProblemError`` when there is none."""
        resource = self._resource(kind)
        return self._store.get(resource, _key(resource, name, namespace)).value

    def all(self, kind: str) -> list[Json]:
        """Return all objects of a kind."""
        return [item.value for item in self._store.all(self._resource(kind))]

    def edit(self, kind: str, name: str, patch: Json, *, namespace: str = "default") -> Json:
        """Merge a patch into an object, its status included; return it."""
        resource = self._resource(kind)
        before = self._store.get(resource, _key(resource, name, namespace)).value
        return self._store.put(resource, patches.merge(before, patch)).value

    def delete(self, kind: str, name: str, *, namespace: str = "default") -> None:
        """Remove an object at once."""
        resource = self._resource(kind)
        self._store.delete(resource, _key(resource, name, namespace))

    def terminate(self, name: str, *, namespace: str = "default") -> None:
        """Ask for a pod's deletion; it is there until :meth:`delete`."""
        self.edit(
            "Pod", name, {"metadata": {"deletionTimestamp": timestamp()}}, namespace=namespace
        )

    def bind(self, name: str, node: str, *, namespace: str = "default") -> None:
        """Bind a pod as a scheduler does; raises 409 when it is bound."""
        self._handler.bind(Target(PODS, namespace, name), node)

    def run_pod(self, name: str, *, namespace: str = "default") -> None:
        """Let a bound pod run and be ready, as a kubelet does."""
        ready = [{"type": "Ready", "status": "True"}]
        status = {"status": {"phase": "Running", "conditions": ready}}
        self.edit("Pod", name, status, namespace=namespace)

    def inject(self, faults: Faults) -> None:
        """Put ``faults`` in force instead of the present ones; ``Faults()`` ends them all."""
        self._faults.replace(faults)
        self._store.tell()

    def accept_tokens(self, *tokens: str) -> None:
        """Take these bearer tokens only; none lets everybody in."""
        self._policy.tokens = frozenset(tokens)

    def allow(self, rules: Mapping[str, Iterable[str]] | None) -> None:
        """Allow verbs by resource, ``{"nodes": ["list", "watch"]}``; ``None`` allows all."""
        self._policy.allowed = (
            None if rules is None else {name: frozenset(verbs) for name, verbs in rules.items()}
        )

    def compact(self) -> None:
        """Forget the past: older versions and open lists' next pages are gone (410)."""
        self._store.compact()

    def restore_backup(self, version: int) -> None:
        """Go back to an earlier version with the present objects; connections break."""
        self._store.go_back(version)
        self.break_connections()

    def write_kubeconfig(self, path: Path, *, token: str = "", **cluster: Any) -> Path:
        """Write a kubeconfig for this double; return its path."""
        user = {"token": token} if token else {}
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "double",
            "clusters": [{"name": "double", "cluster": {"server": self.url, **cluster}}],
            "users": [{"name": "double", "user": user}],
            "contexts": [{"name": "double", "context": {"cluster": "double", "user": "double"}}],
        }
        path.write_bytes(msgspec.yaml.encode(value))
        return path

    async def wait_for_watches(self, count: int = 1, *, timeout_seconds: float = 10.0) -> None:
        """Return once ``count`` watches are open; raises ``TimeoutError``."""
        await self.wait_until(lambda: self.open_watches >= count, timeout_seconds=timeout_seconds)

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout_seconds: float = 10.0
    ) -> None:
        """Return once a condition holds; raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_seconds):
            while not condition():  # noqa: ASYNC110 (any condition, most are no event's)
                await asyncio.sleep(0.005)

    def _resource(self, kind: str) -> Resource:
        for resource in self.config.resources:
            if resource.kind == kind:
                return resource
        raise KeyError(f"the double serves no {kind}")

    async def _listen(self, server: web.Server) -> None:
        """Open the port, waiting for a previous owner to let go of it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.bind_seconds
        while self._listener is None:
            try:
                self._listener = await loop.create_server(
                    server,
                    self.config.host,
                    self._port,
                    ssl=self.config.tls,
                    reuse_address=True,
                    backlog=1024,
                )
            except OSError:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_BIND_RETRY_SECONDS)
        self._port = self._listener.sockets[0].getsockname()[1]

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: object,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,  # type: ignore[arg-type]
            task,
            asyncio.get_running_loop(),
            client_max_size=_MAX_BODY_BYTES,
        )


def _key(resource: Resource, name: str, namespace: str) -> tuple[str, str]:
    return (namespace if resource.is_namespaced else "", name)
