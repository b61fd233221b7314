"""Which engines may serve a request, before any of them is preferred.

Those that serve the model or have the adapter; of them, where the request goes on from an
earlier response, the one that made it; and where clients may choose the data-parallel rank,
those of that rank.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

import structlog

from nearkv.ingress.dialects import RESPONSES_PATH
from nearkv.ingress.errors import RequestError, ResponseGoneError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import Opened
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.model_names import ModelNames
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.response_finding import ResponseFinder
from nearkv.ingress.response_owners import response_id_of
from nearkv.ingress.routing import Policy
from nearkv.ingress.settings import IngressSettings

RANK_HEADER = "X-data-parallel-rank"

log = structlog.get_logger(__name__)


class EngineSelector:
    """Selects engines for requests, and learns who made which response."""

    def __init__(
        self,
        knowledge: Knowledge,
        metrics: IngressMetrics,
        finder: ResponseFinder,
        *,
        settings: IngressSettings,
        now: Callable[[], float],
    ) -> None:
        self._know = knowledge
        self._metrics = metrics
        self._finder = finder
        self.names = ModelNames(settings.models.aliases)
        self._client_ranks = settings.models.client_ranks
        self._client_transfers = settings.models.client_transfer_params
        self._has_homes = settings.policy is Policy.COST
        self._now = now

    async def select(
        self, parsed: GenerateRequest, headers: Mapping[str, str]
    ) -> Sequence[EngineView]:
        """Return the engines that may serve a request.

        Raises ``UnknownModelError``, and what :meth:`narrow` does.
        """
        model = parsed.model
        engines = self._know.fleet.engines.values()
        views = self.serving(model)
        if not views and engines and model is not None:
            raise self.names.unknown(model, engines)
        return await self.narrow(views, parsed, headers)

    async def narrow(
        self, views: Sequence[EngineView], parsed: GenerateRequest, headers: Mapping[str, str]
    ) -> Sequence[EngineView]:
        """Return those of the engines that this very request may go to.

        Raises ``ResponseGoneError`` where the engine that made the earlier response is no
        more, ``RequestError`` for a rank that no engine has, and for a client that says where KV
        lies: it could name any host, and anybody's blocks.
        """
        if parsed.transfer_field and not self._client_transfers:
            raise RequestError(
                f"{parsed.transfer_field}: is not for clients to say "
                "(models.client_transfer_params lets them)",
                param=parsed.transfer_field,
            )
        if parsed.response_id:
            return await self._made(parsed.response_id, views, headers)
        if self._client_ranks and RANK_HEADER in headers:
            return _of_rank(headers[RANK_HEADER], views)
        return views

    def serving(self, model: str | None) -> Sequence[EngineView]:
        """Return the engines that serve a model; ``None`` means any."""
        fleet = self._know.fleet
        return list(fleet.engines.values()) if model is None else fleet.serving(model)

    def present(
        self,
        views: Sequence[EngineView],
        serving: Sequence[EngineView],
        parsed: GenerateRequest,
        headers: Mapping[str, str],
    ) -> Sequence[EngineView]:
        """Return those of the engines serving now that a request may go to, once ``views`` were.

        While it waited, agents may have said everything anew and engines may have been added.
        Where nobody is left those before are all there is to say.
        """
        if parsed.response_id:
            made = {(view.info.id, view.info.incarnation) for view in views}
            serving = [v for v in serving if (v.info.id, v.info.incarnation) in made]
        elif self._client_ranks and RANK_HEADER in headers:
            ranks = {view.info.dp_rank or 0 for view in views}
            serving = [view for view in serving if (view.info.dp_rank or 0) in ranks]
        return serving or views

    async def _made(
        self, response_id: str, views: Sequence[EngineView], headers: Mapping[str, str]
    ) -> Sequence[EngineView]:
        owner = self._know.owners.find(response_id, self._now())
        if owner is None:
            found = await self._finder.find(response_id, views, headers)
            if found is None:
                self._metrics.stateful.add("unknown")
                return views  # whichever it is will say that it knows no such response
            self._metrics.stateful.add("found")
            self._learn(response_id, found)
            return [found]
        for view in views:
            if (view.info.id, view.info.incarnation) == (owner.engine, owner.incarnation):
                self._metrics.stateful.add("known")
                return [view]
        self._metrics.stateful.add("gone")
        raise ResponseGoneError(
            f"Response with id '{response_id}' is gone with the engine that made it.",
            param="previous_response_id",
        )

    def _learn(self, response_id: str, view: EngineView) -> None:
        self._know.owners.learn(response_id, view.info.id, view.info.incarnation, self._now())

    @staticmethod
    def adapter_of(parsed: GenerateRequest, views: Sequence[EngineView]) -> str:
        """Return the adapter that a request names, empty for the base model.

        Engines of a name agree on what it is, and those that tell come first.
        """
        name = parsed.model
        return name if name and views and name in views[0].info.adapters else ""

    def home_of(self, adapter: str) -> PrefixHint | None:
        """Return the engine that served an adapter last: it likely has it on its device still.

        Only policy ``cost`` weighs that against load; others would send all there.
        """
        return self._know.adapter_homes.get(adapter) if adapter and self._has_homes else None

    def answered(
        self, parsed: GenerateRequest, path: str, view: EngineView, opened: Opened
    ) -> None:
        """Learn from the beginning of an engine's answer who made a response."""
        if parsed.kind is not PromptKind.RESPONSES and not parsed.response_id:
            return
        is_made = path == RESPONSES_PATH and opened.response.status == HTTPStatus.OK
        if is_made:
            self._learn(response_id_of(opened.first, whole=opened.whole), view)


def _of_rank(text: str, views: Sequence[EngineView]) -> Sequence[EngineView]:
    """Return the engines of a rank; a server with one rank is rank 0."""
    rank = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1  # noqa: PLR2004 (more digits than any rank)
    found = [view for view in views if (view.info.dp_rank or 0) == rank]
    if views and not found:
        raise RequestError(
            f"{RANK_HEADER}: no engine of this model has rank {text[:20]!r}", param=RANK_HEADER
        )
    return found
