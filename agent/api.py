"""The agent's HTTP API: state, stream, status (DESIGN section 3)."""

import asyncio
import base64
from collections.abc import Iterable, Iterator

import msgspec
import structlog
from aiohttp import web

from nearkv.agent.errors import SnapshotBusyError
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.agent.status import describe_node
from nearkv.block_keys import pack_keys
from nearkv.health import Readiness
from nearkv.serving import cut_connection
from nearkv.state.model import Cursor

STREAM_TYPE = "application/vnd.nearkv.state+msgpack"
_WRITE_SECONDS = 30.0
_BYTES_PER_WRITE = 1 << 19

log = structlog.get_logger(__name__)


class StateApi:
    """Handlers over one node's state."""

    def __init__(
        self,
        state: NodeState,
        readiness: Readiness,
        settings: AgentSettings,
        *,
        started_at: float,
        write_seconds: float = _WRITE_SECONDS,
    ) -> None:
        self._state = state
        self._readiness = readiness
        self._settings = settings
        self._started_at = started_at
        self._write_seconds = write_seconds

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.router.add_get("/v1/state", self.state)
        app.router.add_get("/v1/state/stream", self.stream)
        app.router.add_get("/v1/status", self.status)

    async def status(self, _request: web.Request) -> web.Response:
        """Answer the node's status as JSON."""
        described = describe_node(
            self._state,
            node=self._settings.node,
            started_at=self._started_at,
            limits=self._settings.freshness.limits,
        )
        return _json(described)

    async def state(self, request: web.Request) -> web.Response:
        """Answer a snapshot: the stream's frames, or JSON where the client asks for JSON.

        JSON counts the blocks; ``?keys=true`` adds the packed keys in base64.
        """
        if "json" not in request.headers.get("Accept", ""):
            return web.Response(body=b"".join(self._state.snapshot()), content_type=STREAM_TYPE)
        with_keys = request.query.get("keys") == "true"
        tables = {name: tracker.table for name, tracker in self._state.trackers.items()}
        snapshot = {
            "cursor": str(self._state.log.cursor),
            "node": self._settings.node,
            "engines": list(self._state.log.infos.values()),
            "gauges": list(self._state.log.gauges.values()),
            "blocks": {name: table.blocks_by_tier() for name, table in tables.items()},
        }
        if with_keys:
            snapshot["keys"] = {
                name: {
                    tier: base64.b64encode(pack_keys(keys)).decode()
                    for tier, keys in table.keys_by_tier().items()
                }
                for name, table in tables.items()
            }
        return _json(snapshot)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream a snapshot (unless ``?after=`` is still known), then deltas and heartbeats."""
        cursor = _cursor_of(request)
        if self._state.consumers >= self._settings.state.max_consumers:
            raise web.HTTPServiceUnavailable(
                text=f"too many consumers (limit {self._settings.state.max_consumers})",
                headers={"Retry-After": "5"},
            )
        response = web.StreamResponse(headers={"Cache-Control": "no-store"})
        response.content_type = STREAM_TYPE
        self._state.consumers += 1
        try:
            await response.prepare(request)
            await self._feed(response, cursor)
        except TimeoutError:
            log.warning("consumer_stalled", peer=request.remote)
            cut_connection(request)
        except SnapshotBusyError as error:
            self._state.snapshots_served["busy"] += 1
            log.warning("snapshot_refused", peer=request.remote, error=str(error))
            cut_connection(request)
        except ConnectionError:
            pass
        finally:
            self._state.consumers -= 1
        return response

    async def _feed(self, response: web.StreamResponse, cursor: Cursor | None) -> None:
        """Send what the consumer lacks, and a heartbeat in time even between busy deltas.

        Only heartbeats say how old readings are that did not change. No more deltas are taken out
        of the ring at once than a consumer's queue may hold: one that is slower than the ring
        finds its place gone and gets a snapshot again.
        """
        beat_at = self._state.now()
        why = "first" if cursor is None else "cursor_unknown"
        while not self._readiness.draining:
            frames = self._state.log.after(cursor, self._settings.state.consumer_queue_bytes)
            if cursor is None or frames is None:
                self._state.snapshots_served[why] += 1
                cursor = await self._send_snapshot(response)
                why = "fell_behind"
                beat_at = self._state.now()
                continue
            why = "fell_behind"
            cursor = Cursor(cursor.boot, cursor.epoch, cursor.seq + len(frames))
            if self._state.now() >= beat_at:
                frames.append(self._state.log.heartbeat(self._state.ages_seconds(), cursor))
                beat_at = self._state.now() + self._settings.state.heartbeat_seconds
            if frames:
                await self._write(response, frames)
            else:
                await self._state.wait_for_news(beat_at - self._state.now())

    async def _send_snapshot(self, response: web.StreamResponse) -> Cursor:
        snapshot = self._state.snapshot_to_follow()
        async with asyncio.timeout(self._settings.state.snapshot_seconds):
            await self._write(response, snapshot.frames())
        return snapshot.cursor

    async def _write(self, response: web.StreamResponse, frames: Iterable[bytes]) -> None:
        """Write with back-pressure; a consumer that takes nothing for long is let go.

        A few frames at a time: joined, all that one consumer lacks may be a whole ring, and
        there may be many consumers.
        """
        for batch in _batches(frames):
            async with asyncio.timeout(self._write_seconds):
                await response.write(batch)


def _batches(frames: Iterable[bytes]) -> Iterator[bytes]:
    batch: list[bytes] = []
    size_bytes = 0
    for frame in frames:
        batch.append(frame)
        size_bytes += len(frame)
        if size_bytes >= _BYTES_PER_WRITE:
            yield b"".join(batch)
            batch.clear()
            size_bytes = 0
    if batch:
        yield b"".join(batch)


def _cursor_of(request: web.Request) -> Cursor | None:
    text = request.query.get("after")
    if not text:
        return None
    try:
        return Cursor.parse(text)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"after: {error}") from error


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
