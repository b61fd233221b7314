"""The double as one object: start, stop, restart, kill, and faults."""

import asyncio
import time
from functools import cached_property
from typing import Self

import zmq
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from tests.doubles.engine.api import EngineApi
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.faults import NO_FAULTS, Faults, FaultState
from tests.doubles.engine.publishing import EventPublisher
from tests.doubles.engine.ranks import Rank
from tests.doubles.engine.recording import RequestRecord
from tests.doubles.engine.timing import TimeModel
from tests.doubles.engine.tokenizing import PromptTokenizer

_SHUTDOWN_SECONDS = 1.0
_BIND_RETRY_SECONDS = 0.01
_BACKLOG = 1024


class EngineDouble:
    """A stand-in for one vLLM server; use as ``async with EngineDouble(config) as engine``.

    Ports are picked at the first start and kept by later ones. ``kill`` then ``start`` is a crash
    and a restart: the cache is empty, event numbers begin at 0, the start time changes; requests
    seen so far stay on record and faults are cleared.
    """

    def __init__(self, config: EngineDoubleConfig | None = None) -> None:
        self.config = config or EngineDoubleConfig()
        self.record = RequestRecord(self.config.requests_kept)
        self.ranks: list[Rank] = []
        self._faults = FaultState()
        self._times = TimeModel(self.config)
        self._port = self.config.port
        self._event_endpoints: list[tuple[str, str]] = []
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._reopening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Base URL, without a path; valid after the first start."""
        return f"http://{self.config.host}:{self._port}"

    @property
    def kv_events_endpoint(self) -> str:
        """ZMQ endpoint of rank 0's live events."""
        return self.kv_events_endpoints[0]

    @property
    def kv_replay_endpoint(self) -> str:
        """ZMQ endpoint of rank 0's replay."""
        return self.kv_replay_endpoints[0]

    @property
    def kv_events_endpoints(self) -> list[str]:
        """ZMQ endpoints of live events by rank; empty without events."""
        return [live for live, _ in self._event_endpoints]

    @property
    def kv_replay_endpoints(self) -> list[str]:
        """ZMQ endpoints of replay by rank; empty without events."""
        return [replay for _, replay in self._event_endpoints]

    @property
    def is_listening(self) -> bool:
        """Whether its port is open: not after ``kill``, nor while a fault refuses connections."""
        return self._listener is not None

    async def start(self) -> None:
        """Begin a new incarnation on the ports of the last one.

        Raises:
            OSError, zmq.ZMQError: when a port is still taken after ``bind_seconds``.
            RuntimeError: when it runs already.
        """
        if self._server is not None:
            raise RuntimeError("the engine double runs already")
        try:
            await self._start()
        except (OSError, zmq.ZMQError):
            self.kill()
            raise

    async def _start(self) -> None:
        self._faults.replace(NO_FAULTS)
        self._times.slow_factor = 1.0
        self.ranks = [
            Rank(self.config, index=index, times=self._times)
            for index in range(self.config.dp_size)
        ]
        await self._start_publishers()
        api = EngineApi(
            self.config,
            ranks=self.ranks,
            tokenizer=self._tokenizer,
            record=self.record,
            faults=self._faults,
            inject=self.inject,
            started_at=time.time(),
        )
        self._server = web.Server(
            api.handle,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
        )
        await self._listen()

    async def stop(self) -> None:
        """Stop serving and wait until nothing is left; harmless when stopped."""
        server = self._server
        self.kill()
        if server is not None:
            await server.shutdown(_SHUTDOWN_SECONDS)
        if self._reopening is not None:
            await asyncio.gather(self._reopening, return_exceptions=True)
            self._reopening = None

    async def restart(self) -> None:
        """Crash and start again on the same ports."""
        await self.stop()
        await self.start()

    def kill(self) -> None:
        """Crash: every connection breaks and all ports close, at once."""
        self._close_port()
        if self._reopening is not None:
            self._reopening.cancel()
        for publisher in self._publishers:
            publisher.stop()
        self.ranks = []
        self._server = None

    async def inject(self, faults: Faults, *, spared: asyncio.BaseTransport | None = None) -> None:
        """Put ``faults`` in force instead of the present ones; ``Faults()`` ends them all.

        ``spared`` is a connection that refusing connections leaves open, for its answer.
        """
        self._faults.replace(faults)
        self._times.slow_factor = faults.slow_factor
        for publisher in self._publishers:
            publisher.drop_batches = faults.drop_event_batches
            publisher.garbage_batches = faults.garbage_event_batches
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        if self._server is None:
            return
        if faults.refuse_connections_seconds > 0:
            self._close_port(spared)
            self._reopening = asyncio.create_task(self._reopen(faults.refuse_connections_seconds))
        elif self._listener is None:
            await self._listen()

    async def wait_for_subscribers(
        self, count: int = 1, *, rank: int = 0, timeout_seconds: float = 5.0
    ) -> None:
        """Return once ``count`` subscriptions to a rank's events are in effect.

        Raises:
            TimeoutError: when they are not in time.
        """
        publisher = self._publishers[rank]
        await publisher.wait_for_subscribers(count, timeout_seconds=timeout_seconds)

    @cached_property
    def _tokenizer(self) -> PromptTokenizer:
        return PromptTokenizer(self.config)

    @property
    def _publishers(self) -> list[EventPublisher]:
        return [rank.publisher for rank in self.ranks if rank.publisher is not None]

    async def _start_publishers(self) -> None:
        free = f"tcp://{self.config.host}:*"
        for index, publisher in enumerate(self._publishers):
            known = self._event_endpoints[index:]
            live, replay = known[0] if known else (free, free)
            await publisher.start(endpoint=live, replay_endpoint=replay)
            if not known:
                self._event_endpoints.append((publisher.endpoint, publisher.replay_endpoint))

    async def _listen(self) -> None:
        """Open the port, waiting for a previous owner to let go of it."""
        assert self._server is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.bind_seconds
        while self._listener is None:
            try:
                self._listener = await loop.create_server(
                    self._server,
                    self.config.host,
                    self._port,
                    reuse_address=True,
                    backlog=_BACKLOG,
                )
            except OSError:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_BIND_RETRY_SECONDS)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _reopen(self, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        await self._listen()

    def _close_port(self, spared: asyncio.BaseTransport | None = None) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._server is not None:
            for connection in self._server.connections:
                if connection.transport not in (None, spared):
                    connection.transport.abort()

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
            client_max_size=self.config.max_body_bytes,
        )
