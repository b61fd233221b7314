"""Asking a prefiller: one token, and the parameters that say where its KV is."""

from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import msgspec
import structlog
from aiohttp import web

from nearkv.bounded_reading import AnswerTooLargeError
from nearkv.http_failures import explain_failure
from nearkv.ingress.extproc.endpoints import Membership
from nearkv.ingress.forwarding import Forwarder, Target
from nearkv.ingress.prefill_leg import (
    UnreadableAnswerError,
    prefill_body,
    read_params,
)
from nearkv.ingress.sidecar.metrics import SidecarMetrics
from nearkv.ingress.sidecar.prefillers import Allowed, named_prefillers

CHAT_PATH = "/v1/chat/completions"
_MOST_ANSWER_BYTES = 1 << 20

log = structlog.get_logger(__name__)


class Prefilling:
    """Runs prefill legs; each one's end has a name that is counted."""

    def __init__(
        self,
        forwarder: Forwarder,
        metrics: SidecarMetrics,
        *,
        allowed: Allowed,
        membership: Callable[[], Membership | None],
        deadline_seconds: float,
    ) -> None:
        self._forwarder = forwarder
        self._metrics = metrics
        self._allowed = allowed
        self._membership = membership
        self._deadline_seconds = deadline_seconds

    async def run(
        self, request: web.Request, fields: dict[str, msgspec.Raw], header: str, request_id: str
    ) -> tuple[msgspec.Raw | None, str]:
        """Ask the prefillers that a header names, in order; return parameters and outcome.

        Without parameters the engine computes the prompt itself. The next prefiller is tried
        only where the one before failed or may not be asked.
        """
        outcome = "not_named"
        for name in named_prefillers(header):
            params, outcome = await self._ask(request, fields, name, request_id)
            self._metrics.prefills.add(outcome)
            if outcome not in ("failed", "timeout", "not_allowed", "malformed"):
                return params, outcome
        return None, outcome

    async def _ask(
        self, request: web.Request, fields: dict[str, msgspec.Raw], name: str, request_id: str
    ) -> tuple[msgspec.Raw | None, str]:
        try:
            if not self._allowed.allows(name, self._membership()):
                self._warn("prefiller_not_allowed", name, request_id, "see sidecar.prefillers")
                return None, "not_allowed"
        except ValueError as error:
            self._warn("prefiller_malformed", name[:200], request_id, str(error)[:200])
            return None, "malformed"
        try:
            asked = await self._forwarder.ask(
                request,
                prefill_body(fields, is_chat=request.path == CHAT_PATH),
                target=Target(name, f"http://{name}"),
                request_id=request_id,
                deadline_seconds=self._deadline_seconds,
                limit_bytes=_MOST_ANSWER_BYTES,
            )
        except AnswerTooLargeError:
            return None, "unreadable"
        except (aiohttp.ServerTimeoutError, aiohttp.ClientError, OSError) as error:
            is_late = isinstance(error, TimeoutError) and not isinstance(
                error, aiohttp.ServerTimeoutError
            )
            self._warn("prefill_failed", name, request_id, explain_failure(error))
            return None, "timeout" if is_late else "failed"
        return self._read(asked.status, asked.body, name, request_id)

    def _read(
        self, status: int, body: bytes, name: str, request_id: str
    ) -> tuple[msgspec.Raw | None, str]:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._warn("prefill_failed", name, request_id, f"status {status}")
            return None, "failed"
        if status != HTTPStatus.OK:
            return None, "refused"  # the request's own fault, most likely: the engine will say
        try:
            params = read_params(body)
        except UnreadableAnswerError as error:
            self._warn("prefill_answer_unreadable", name, request_id, str(error))
            return None, "unreadable"
        return params, "no_kv" if params is None else "ok"

    def _warn(self, event: str, prefiller: str, request_id: str, error: str) -> None:
        log.warning(event, prefiller=prefiller, request_id=request_id, error=error)
