"""Which engines a gateway can reach, and by which endpoint."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import structlog

from nearkv.ingress.errors import NoEngineError, UnknownModelError
from nearkv.ingress.extproc.endpoints import (
    Membership,
    endpoint_of,
    is_within,
    unknown_members,
)
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.state.model import EngineInfo, EngineState

_MODELS_NAMED = 50
_MODELS_KEPT = 1024
_MODEL_LENGTH = 200

log = structlog.get_logger(__name__)


class Reach:
    """The engines of the fleet by endpoint, within the pool where there is one.

    Members of the pool that no agent speaks of are engines too: of any model, and routed to
    by load alone. ``membership`` returns ``None`` where there is no pool, and the same object
    for as long as nothing changed.
    """

    def __init__(
        self,
        fleet: Fleet,
        membership: Callable[[], Membership | None],
        count_skipped: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._membership = membership
        self._count_skipped = count_skipped
        self._seen: Membership | None = None
        self._models: Mapping[str, Sequence[EngineView]] = {}
        self._of_model: dict[str | None, list[EngineView]] = {}
        self._by_url: dict[str, str] = {}
        self._strangers: dict[str, EngineView] = {}

    def endpoint(self, view: EngineView) -> str:
        """Return an engine's endpoint, empty where the gateway cannot reach it.

        It is that of the membership when engines were last asked for.
        """
        url = view.info.url
        found = self._by_url.get(url)
        if found is None:
            membership = self._seen
            found = self._by_url[url] = endpoint_of(url, membership)
            if not found:
                why = "no_address" if membership is None else "not_in_pool"
                self._count_skipped(why)
                log.warning("engine_not_reachable", engine=view.info.id, url=url, why=why)
        return found

    def views(self, model: str | None, subset: Collection[str] | None) -> Sequence[EngineView]:
        """Return the engines that may serve a model within a gateway's restriction.

        Raises ``UnknownModelError``, and ``NoEngineError`` where there is none to reach.
        """
        self._forget_the_past()
        found = self._of_model.get(model)
        if found is None:
            if len(self._of_model) >= _MODELS_KEPT:  # names are the clients' to choose
                self._of_model.clear()
            found = self._of_model[model] = self._look_for(model)
        if subset is not None:
            found = [view for view in found if is_within(self.endpoint(view), subset)]
            if not found:
                raise NoEngineError("no engine that could serve this request is in the subset")
        return found

    def _look_for(self, model: str | None) -> list[EngineView]:
        engines = self._fleet.engines
        strangers = self._unknown_members(engines.values())
        able = list(engines.values()) if model is None else list(self._fleet.serving(model))
        if model is not None and not able and not strangers and engines:
            raise UnknownModelError(_unknown(model, engines.values()), param="model")
        able += strangers
        if not able:
            raise NoEngineError("no engine is known that could serve this request")
        reachable = list(filter(self.endpoint, able))
        if not reachable:
            raise NoEngineError(
                f"none of the {len(able)} engines that could serve this request is one that the"
                " gateway can reach"
            )
        return reachable

    def at(self, endpoint: str) -> EngineView | None:
        """Return the engine behind an endpoint; of several (ranks), any."""
        self._forget_the_past()
        everyone = (*self._fleet.engines.values(), *self._strangers.values())
        return next((view for view in everyone if self.endpoint(view) == endpoint), None)

    def _forget_the_past(self) -> None:
        """Forget what was worked out for another fleet, or another membership."""
        membership, models = self._membership(), self._fleet.models
        if membership is self._seen and models is self._models:
            return
        if membership is not self._seen or len(self._by_url) > 4 * len(self._fleet.engines) + 64:
            self._by_url.clear()
            self._strangers.clear()
        self._seen, self._models = membership, models
        self._of_model.clear()

    def _unknown_members(self, known: Iterable[EngineView]) -> list[EngineView]:
        membership = self._seen
        if membership is None:
            return []
        found = {}
        endpoints = list(filter(None, map(self.endpoint, known)))
        for name, endpoint in unknown_members(membership, endpoints):
            view = self._strangers.get(endpoint)
            if view is None:
                url = f"http://{endpoint}"
                info = EngineInfo(id=name, incarnation="", url=url, state=EngineState.READY)
                view = EngineView(info, agent="")
            found[endpoint] = view
        self._strangers = found
        return list(found.values())


def _unknown(model: str, engines: Iterable[EngineView]) -> str:
    known = sorted({name for v in engines for name in (*v.info.models, *v.info.adapters)})
    named = ", ".join(known[:_MODELS_NAMED])
    return f"The model `{model[:_MODEL_LENGTH]}` does not exist. Known: {named}."
