"""Endpoints about the engine itself: models, health, load, metrics, event sources, sleep."""

from http import HTTPStatus

import msgspec
from aiohttp import web

from tests.doubles.engine import answers
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.generating import Generator
from tests.doubles.engine.metrics import EngineMetrics, render_metrics
from tests.doubles.engine.ranks import Rank
from tests.doubles.engine.replying import VARY, Call, json_response, status_error
from tests.doubles.engine.requests import ApiError

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineAdmin:
    """Answers what needs no model; every method is one endpoint."""

    def __init__(
        self,
        config: EngineDoubleConfig,
        *,
        ranks: list[Rank],
        generator: Generator,
        started_at: float,
    ) -> None:
        self._config = config
        self._generator = generator
        self._ranks = ranks
        self._started_at = started_at
        self._metrics = EngineMetrics(config, ranks, started_at)

    def models(self) -> web.Response:
        """``GET /v1/models``."""
        adapters = self._generator.adapters
        return json_response(answers.models(self._config, adapters, created=int(self._started_at)))

    async def load_adapter(self, call: Call) -> web.StreamResponse:
        """``POST /v1/load_lora_adapter``, as where vLLM allows that at run time."""
        name = msgspec.json.decode(call.body)["lora_name"]
        self._generator.load_adapter(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, call: Call) -> web.StreamResponse:
        """``POST /v1/unload_lora_adapter``."""
        name = msgspec.json.decode(call.body)["lora_name"]
        if not self._generator.unload_adapter(name):
            message = f"The lora adapter '{name}' cannot be found."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def health(self) -> web.Response:
        """``GET /health``."""
        return web.Response(headers=VARY)

    def version(self) -> web.Response:
        """``GET /version``."""
        return json_response({"version": self._config.version})

    def load(self) -> web.Response:
        """``GET /load``: requests waiting or running."""
        load = sum(rank.statistics.waiting + rank.statistics.running for rank in self._ranks)
        return json_response({"server_load": load})

    def metrics(self) -> web.Response:
        """``GET /metrics``."""
        headers = VARY | {"Content-Type": _METRICS_TYPE}
        return web.Response(body=render_metrics(self._metrics), headers=headers)

    def event_sources(self) -> web.Response:
        """``GET /kv_event_sources``; older engines do not have it."""
        if not self._config.offer_kv_event_sources:
            raise status_error(HTTPStatus.NOT_FOUND)
        return json_response(answers.event_sources(self._config, self._ranks))

    def reset_prefix_cache(self) -> web.Response:
        """``POST /reset_prefix_cache``; refused while requests run."""
        cleared = [rank.cache.clear() for rank in self._ranks]
        return json_response({"success": all(cleared)})

    async def sleep(self, call: Call) -> web.StreamResponse:
        """``POST /sleep?level=1``."""
        level = call.request.query.get("level", "1")
        if level not in {"0", "1", "2"}:
            raise ApiError(400, f"level must be 0, 1 or 2, got {level}", "Bad Request")
        for rank in self._ranks:
            rank.sleep(int(level))
        return web.Response(headers=VARY)

    def wake_up(self) -> web.Response:
        """``POST /wake_up``."""
        for rank in self._ranks:
            rank.wake_up()
        return web.Response(headers=VARY)

    def load_headers(self, form: str | None) -> dict[str, str]:
        """Return the load report header a request asked for by ``form``, JSON or TEXT (ORCA).

        The request itself is over by then, so an idle engine reports 0, as in the capture.
        """
        if form is None:
            return {}
        usage = sum(rank.cache.used_ratio for rank in self._ranks) / len(self._ranks)
        waiting = float(sum(rank.statistics.waiting for rank in self._ranks))
        if form.upper() == "JSON":
            named = f'"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}'
            return {"endpoint-load-metrics": f'JSON {{"named_metrics": {{{named}}}}}'}
        report = (
            f"named_metrics.num_requests_waiting={waiting},"
            f" named_metrics.kv_cache_usage_perc={usage}"
        )
        return {"endpoint-load-metrics": f"TEXT {report}"}
