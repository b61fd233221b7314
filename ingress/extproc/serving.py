"""The gRPC servers: the picker's, and one for probes where that is wanted.

The one module here that knows gRPC, which is loaded when a server starts. Messages are given
and taken as bytes, so nothing is generated and no protobuf library is needed.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from nearkv.errors import ListenError
from nearkv.health import Readiness
from nearkv.ingress.errors import IngressError
from nearkv.ingress.extproc.conversing import Conversation
from nearkv.ingress.extproc.health import (
    CHECK,
    HEALTH_SERVICE,
    WATCH,
    Serving,
    asked_service,
    encode_status,
    status_of,
)
from nearkv.ingress.extproc.messages import PROCESS, SERVICE
from nearkv.protobuf import WireError
from nearkv.settings import Address, TlsSettings

_WATCH_SECONDS = 0.2
_ROOM_BYTES = 1 << 20
"""What a message may have beyond its body: headers and metadata."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the running servers listen; ``health`` is ``None`` without one of its own."""

    picker: Address
    health: Address | None = None


class _GrpcCall:
    """A stream of grpc.aio as the conversation sees it."""

    def __init__(self, context: Any, end: object) -> None:  # noqa: ANN401 (gRPC has no types)
        self._context = context
        self._end = end

    async def messages(self) -> AsyncIterator[bytes]:
        while (data := await self._context.read()) is not self._end:
            yield data

    async def send(self, answer: bytes) -> None:
        await self._context.write(answer)


class _Handlers:
    """What the servers answer."""

    def __init__(
        self,
        grpc: Any,  # noqa: ANN401 (gRPC has no types)
        conversation: Conversation,
        readiness: Readiness,
        track: "Track",
    ) -> None:
        self._grpc = grpc
        self._conversation = conversation
        self._readiness = readiness
        self._track = track

    async def process(self, _requests: object, context: Any) -> None:  # noqa: ANN401 (gRPC has no types)
        with self._track():
            try:
                await self._conversation.serve(_GrpcCall(context, self._grpc.aio.EOF))
            except WireError as error:
                log.warning("stream_unreadable", error=str(error), peer=context.peer())
                await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def check(self, data: bytes, context: Any) -> bytes:  # noqa: ANN401 (gRPC has no types)
        status = status_of(_name(data), is_ready=self._readiness.is_ready)
        if status is Serving.SERVICE_UNKNOWN:
            await context.abort(self._grpc.StatusCode.NOT_FOUND, "no such service")
        return encode_status(status)

    async def watch(self, data: bytes, context: Any) -> None:  # noqa: ANN401 (gRPC has no types)
        told = None
        while True:
            status = status_of(_name(data), is_ready=self._readiness.is_ready)
            if status is not told:
                await context.write(encode_status(status))
                told = status
            await asyncio.sleep(_WATCH_SECONDS)


Track = Callable[[], Any]


def _name(data: bytes) -> str:
    try:
        return asked_service(data)
    except WireError:
        return "unreadable"


@asynccontextmanager
async def serving(  # noqa: PLR0913 - its collaborators, by keyword
    *,
    conversation: Conversation,
    readiness: Readiness,
    listen: Address,
    health_listen: Address | None,
    tls: TlsSettings | None,
    limit_bytes: int,
    close_seconds: float,
    track: Track,
) -> AsyncIterator[Servers]:
    """Serve inside the block; on exit, streams get ``close_seconds`` to end.

    Raises ``ListenError`` when an address cannot be listened on.
    """
    grpc, aio = _load_grpc()
    handlers = _Handlers(grpc, conversation, readiness, track)
    credentials = None if tls is None else _credentials(grpc, tls)
    picker = _server(grpc, aio, handlers, limit_bytes=limit_bytes, picks=True)
    servers = [picker]
    address = _bind(picker, listen, credentials)
    health_address = None
    if health_listen is not None:
        probes = _server(grpc, aio, handlers, limit_bytes=_ROOM_BYTES, picks=False)
        servers.append(probes)
        health_address = _bind(probes, health_listen, None)
    try:
        for server in servers:
            await server.start()
        log.info("ext_proc_listening", address=str(address), tls=tls is not None)
        yield Servers(address, health_address)
    finally:
        stops: list[Coroutine[Any, Any, None]] = [server.stop(close_seconds) for server in servers]
        await asyncio.gather(*stops)


def _load_grpc() -> tuple[Any, Any]:
    try:
        return importlib.import_module("grpc"), importlib.import_module("grpc.aio")
    except ImportError as error:
        raise IngressError(f"{error}; install it with: pip install 'nearkv[envoy]'") from error


def _server(grpc: Any, aio: Any, handlers: _Handlers, *, limit_bytes: int, picks: bool) -> Any:  # noqa: ANN401 (gRPC has no types)
    server = aio.server(
        options=(
            ("grpc.max_receive_message_length", limit_bytes + _ROOM_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            # Connections of Envoy that is gone without a word are found out.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        )
    )
    services = {
        HEALTH_SERVICE: {
            CHECK.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(handlers.check),
            WATCH.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(handlers.watch),
        }
    }
    if picks:
        method = grpc.stream_stream_rpc_method_handler(handlers.process)
        services[SERVICE] = {PROCESS.rpartition("/")[2]: method}
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, by) for name, by in services.items())
    )
    return server


def _bind(server: Any, address: Address, credentials: Any) -> Address:  # noqa: ANN401 (gRPC has no types)
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    if not port:
        raise ListenError(f"cannot listen on {address}")
    return Address(address.host, port)


def _credentials(grpc: Any, tls: TlsSettings) -> Any:  # noqa: ANN401 (gRPC has no types)
    """Return credentials that take renewed files over with the next connection."""
    with_clients = tls.client_ca is not None

    def load() -> Any:  # noqa: ANN401 (gRPC has no types)
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read_bytes(), tls.cert.read_bytes())],
            root_certificates=None if tls.client_ca is None else tls.client_ca.read_bytes(),
        )

    signature = _signature(tls)
    try:
        first = load()
    except OSError as error:
        raise IngressError(
            f"ext_proc.tls: cannot read {error.filename}: {error.strerror}"
        ) from error

    def renewed() -> Any:  # noqa: ANN401 (gRPC has no types)
        nonlocal signature
        try:
            found = _signature(tls)
            if found == signature:
                return None
            configuration = load()
        except OSError as error:  # half written: the last good pair stays in use
            log.warning("certificate_not_loaded", error=str(error))
            return None
        signature = found
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        first, renewed, require_client_authentication=with_clients
    )


def _signature(tls: TlsSettings) -> tuple[tuple[Path, int, int], ...]:
    files = [path for path in (tls.cert, tls.key, tls.client_ca) if path is not None]
    stats = [(path, path.stat()) for path in files]
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)
