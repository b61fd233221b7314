"""Everything that comes to the pod's serving port: passed on to the engine beside us.

A request that names a prefiller goes there first. No failure on the way is an error to the
client: without KV from elsewhere the engine computes the prompt itself.
"""

import asyncio
import time
from http import HTTPStatus

import msgspec
import structlog
from aiohttp import web

from nearkv.ingress.accepting import RequestIds
from nearkv.ingress.answers import error_response
from nearkv.ingress.bodies import BodyRoom, HeldRoom
from nearkv.ingress.dialects import MESSAGES_PATH
from nearkv.ingress.errors import EngineFailedError, IngressError
from nearkv.ingress.extproc.picking import PREFILL_HEADER, PREFILLER_HEADER, RANK_HEADER
from nearkv.ingress.forwarding import Forwarder, Opened, Outcome, RetryableFailureError, Target
from nearkv.ingress.prefill_leg import decode_body, read_fields, why_whole
from nearkv.ingress.sidecar.metrics import SidecarMetrics
from nearkv.ingress.sidecar.prefilling import CHAT_PATH, Prefilling
from nearkv.serving import InFlight

_MOST_RANK_DIGITS = 6
_SPLIT_PATHS = frozenset({"/v1/completions", CHAT_PATH, MESSAGES_PATH})

log = structlog.get_logger(__name__)


class SidecarHandler:
    """Handles every request."""

    def __init__(
        self,
        *,
        engine_url: str,
        forwarder: Forwarder,
        prefilling: Prefilling,
        metrics: SidecarMetrics,
        in_flight: InFlight,
        bodies: BodyRoom,
    ) -> None:
        self._engine_url = engine_url
        self._forwarder = forwarder
        self._prefilling = prefilling
        self._metrics = metrics
        self._in_flight = in_flight
        self._bodies = bodies
        self._request_ids = RequestIds()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; errors become OpenAI's envelope, with a reason header."""
        request_id = self._request_ids.of(request.headers.get("X-Request-Id", ""))
        self._in_flight.enter(request)
        try:
            with self._bodies.hold() as held:
                return await self._serve(request, request_id, held)
        except IngressError as error:
            log.info("refused", path=request.path, request_id=request_id, reason=error.reason)
            self._metrics.requests.add(str(error.status))
            return error_response(error, request_id=request_id, path=request.path)
        finally:
            self._in_flight.leave(request)

    async def _serve(
        self, request: web.Request, request_id: str, held: HeldRoom
    ) -> web.StreamResponse:
        body = await self._bodies.read(request, held)
        headers: dict[str, str] = {"X-Request-Id": request_id}
        opened: Opened | None = None
        prefiller = request.headers.get(PREFILLER_HEADER, "")
        if prefiller and request.method == "POST" and request.path in _SPLIT_PATHS:
            opened, headers[PREFILL_HEADER] = await self._in_two(
                request, body, prefiller, request_id
            )
        if opened is None:
            opened = await self._open(request, body, request_id)
        outcome = Outcome()
        try:
            return await self._forwarder.relay(
                request, opened, headers, outcome, first_byte=lambda: None
            )
        except asyncio.CancelledError:
            outcome.error = "client_gone"
            raise
        finally:
            self._metrics.requests.add(str(opened.response.status))
            if outcome.error is not None:
                self._metrics.broken_streams.add(outcome.error)

    async def _in_two(
        self, request: web.Request, body: bytes, prefiller: str, request_id: str
    ) -> tuple[Opened | None, str]:
        """Have somebody prefill, then open the engine's answer with what they said.

        Returns no answer where the request has to go to the engine as it is.
        """
        fields, why = _splittable(body)
        if fields is None:
            self._metrics.prefills.add(why)
            return None, why
        started_at = time.perf_counter()
        params, outcome = await self._prefilling.run(request, fields, prefiller, request_id)
        if params is None:
            return None, outcome
        self._metrics.prefill_seconds.observe(time.perf_counter() - started_at)
        opened = await self._open(request, decode_body(body, fields, params), request_id)
        if opened.response.status < HTTPStatus.BAD_REQUEST:
            self._metrics.decodes.add("ok")
            return opened, outcome
        # Perhaps it is the parameters that the engine does not like; as it is, the request is
        # the client's own, and so will be the error.
        self._metrics.decodes.add("refused")
        opened.response.close()
        return None, "params_refused"

    async def _open(self, request: web.Request, body: bytes, request_id: str) -> Opened:
        """Open the engine's answer; its own errors are answers, too."""
        rank = request.headers.get(RANK_HEADER, "")
        is_rank = len(rank) <= _MOST_RANK_DIGITS and rank.isascii() and rank.isdigit()
        target = Target("local", self._engine_url, int(rank) if is_rank else None)
        try:
            return await self._forwarder.open(request, body, target, request_id)
        except RetryableFailureError as error:
            if error.opened is not None:
                return error.opened
            raise EngineFailedError(f"the engine beside the sidecar failed: {error}") from error


def _splittable(body: bytes) -> tuple[dict[str, msgspec.Raw] | None, str]:
    """Return a body's fields where it can be split, else why not."""
    try:
        fields = read_fields(body)
    except ValueError:
        return None, "unreadable_body"  # the engine may be less strict, and will say
    why = why_whole(fields)
    return (None, why) if why else (fields, "")
