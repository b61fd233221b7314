"""The ingress's own endpoints: models, status."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from nearkv.health import Readiness
from nearkv.ingress.answers import ENGINE_HEADER, NO_ENGINE, REASON_HEADER
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.status import describe_ingress


class OwnApi:
    """Handlers that need no engine."""

    def __init__(
        self,
        settings: IngressSettings,
        knowledge: Knowledge,
        readiness: Readiness,
        *,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._know = knowledge
        self._readiness = readiness
        self._now = now

    async def status(self, _request: web.Request) -> web.Response:
        """Answer this replica's view as JSON."""
        described = describe_ingress(
            self._settings, self._know, ready=self._readiness.is_ready, now=self._now()
        )
        return _json(described)

    async def models(self, _request: web.Request) -> web.Response:
        """List the models and adapters that the fleet serves, each once."""
        lengths: dict[str, int | None] = {}
        parents: dict[str, str] = {}
        for view in self._know.fleet.engines.values():
            for name in view.info.models:
                lengths.setdefault(name, view.info.max_model_len)
            for name in view.info.adapters:
                lengths.setdefault(name, view.info.max_model_len)
                parents.setdefault(name, view.info.model)
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "nearkv",
                "max_model_len": length,
                "parent": parents.get(name),
            }
            for name, length in sorted(lengths.items())
        ]
        return _json({"object": "list", "data": cards})


def _json(value: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers={ENGINE_HEADER: NO_ENGINE, REASON_HEADER: "own_answer"},
    )
