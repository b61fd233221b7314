"""Finding a request's block keys: remembered, or by asking one engine for its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
from aiohttp import web

from nearkv.block_keys import KeyNamespace, root_key
from nearkv.ingress.attempts import Attempts
from nearkv.ingress.errors import TokenizationError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity import ParityMode
from nearkv.ingress.recording.watching import RequestWatch, unwatched
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.routing import Policy
from nearkv.ingress.tenants import Tenant
from nearkv.ingress.tokens.engine_tokenizer import EngineRef
from nearkv.ingress.tokens.memo import PromptKeys
from nearkv.ingress.tokens.service import KeyScope
from nearkv.state.model import EngineState

_SPEAKERS = 2
_TRIED_AGAIN_EVERY = 16
"""Of the prompts whose tokens are a guess that did not come true lately, one in so many."""
_JSON_SPACE = b" \t\r\n"
_BYTES_PER_TOKEN = 4
_ROOTS_KEPT = 1024
_LONGEST_SALT_KEPT = 256
"""Salts are the clients' to choose, up to a whole body each."""
_LOOKING_AT_PREFIXES = (Policy.COST, Policy.PREFIX_FIRST)

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Job:
    """One request on its way: what came in, and what was found out so far.

    ``fields`` are the body's, read only where the request may be split; ``pairs_left`` and
    ``failed_sources`` say what became of earlier pairs. ``adapter`` is the LoRA adapter asked
    for.
    """

    web_request: web.Request
    path: str
    body: bytes
    parsed: GenerateRequest
    request_id: str
    arrived_at: float
    views: Sequence[EngineView]
    prompt: PromptKeys | None = None
    prefix_ids: tuple[str, ...] = ()
    hint: PrefixHint | None = None
    priority: int = 0
    tenant: Tenant | None = None
    tried: set[str] = field(default_factory=set)
    fields: dict[str, msgspec.Raw] | None = None
    pairs_left: int = 2
    failed_sources: set[str] = field(default_factory=set)
    attempts: Attempts | None = None
    watch: RequestWatch = field(default_factory=unwatched)
    adapter: str = ""

    @property
    def charged_tokens(self) -> int:
        """Prompt tokens to count against a tenant: known, or guessed by the size of the body.

        Only the first of several prompts is tokenized, and some requests are not at all; neither
        is a way around a limit. Bodies that are no JSON (audio, say) have no prompt to count.
        """
        known = 0 if self.prompt is None else self.prompt.token_count
        if self.prompt is not None and not self.parsed.several:
            return known
        is_json = self.body.lstrip(_JSON_SPACE).startswith(b"{")
        return max(known, len(self.body) // _BYTES_PER_TOKEN) if is_json else known

    @property
    def guessed_as(self) -> str:
        """What kind of guess the prompt's tokens are; empty where they are those of the engine."""
        if self.prompt is None or self.prompt.exact:
            return ""
        return f"{self.parsed.kind.value} of {self.parsed.model}"


class KeyFinder:
    """Gives jobs their prompt's block keys, with at most one tokenization each."""

    def __init__(
        self,
        knowledge: Knowledge,
        metrics: IngressMetrics,
        policy: Policy,
        now: Callable[[], float],
    ) -> None:
        self._know = knowledge
        self._metrics = metrics
        self._policy = policy
        self._now = now
        self._roots: dict[tuple[str, str, str], int] = {}
        self._distrusted = 0

    async def find(self, job: Job) -> None:
        """Set ``job.prompt``; without any, routing goes on by hint and load.

        Policies that do not look at prefixes need none. An engine that cannot be connected
        to was not asked, so another one is.
        """
        if job.parsed.kind is PromptKind.NONE or self._policy not in _LOOKING_AT_PREFIXES:
            return
        if _is_too_long(job):
            return
        job.prompt = self._recall(job)
        for _ in range(_SPEAKERS):
            speaker = None if job.prompt is not None else self._choose_speaker(job.views)
            if speaker is None:
                break
            try:
                job.prompt = await self._ask(job, speaker)
            except TokenizationError as error:
                self._metrics.tokenizations.add("failed")
                log.warning("no_tokens", request_id=job.request_id, error=str(error))
                if not error.unreachable:
                    break
                info = speaker.info
                self._know.suspects.failed(info.id, info.incarnation, self._now())
        if job.prompt is not None:
            self._metrics.tokenizations.add(job.prompt.source)
            if not job.prompt.exact:
                self._doubt(job)

    def _doubt(self, job: Job) -> None:
        """Drop keys that rest on a guess, while such guesses do not come true.

        One in a few is kept all the same, to see whether they do again.
        """
        mode = self._know.guesses.mode(job.guessed_as, "")
        if mode is ParityMode.EXACT:
            return
        self._distrusted += 1
        if self._distrusted % _TRIED_AGAIN_EVERY:
            job.prompt = None
            self._metrics.tokenizations.add("distrusted")

    def _recall(self, job: Job) -> PromptKeys | None:
        """Return the keys without asking anybody, where the same prompt was seen before."""
        for view in job.views:
            if view.info.block_size is not None:
                return self._know.tokens.recall(job.parsed, self._scope(view, job.parsed))
        return None

    async def _ask(self, job: Job, speaker: EngineView) -> PromptKeys:
        info = speaker.info
        return await self._know.tokens.keys_of(
            job.parsed,
            job.body,
            job.path,
            scope=self._scope(speaker, job.parsed),
            engine=EngineRef(info.id, info.incarnation, info.url),
        )

    def _choose_speaker(self, views: Sequence[EngineView]) -> EngineView | None:
        """Return the engine to ask for tokens: a ready one, the least busy of them."""
        now = self._now()
        able = [
            view
            for view in views
            if view.info.block_size is not None
            and view.info.state is EngineState.READY
            and not self._know.suspects.is_suspect(view.info.id, view.info.incarnation, now)
        ]
        return min(able, key=self._business, default=None)

    def _business(self, view: EngineView) -> tuple[int, str]:
        in_flight = self._know.ledger.at(view.info.id, view.info.incarnation)
        return in_flight.requests, view.info.id

    def _scope(self, view: EngineView, parsed: GenerateRequest) -> KeyScope:
        info = view.info
        lora = parsed.model if parsed.model in info.adapters and parsed.model else ""
        name = (info.key_model, lora, parsed.cache_salt)
        root = self._roots.get(name)
        if root is None:
            root = root_key(KeyNamespace(*name), self._know.secret)
            if len(parsed.cache_salt) <= _LONGEST_SALT_KEPT:
                if len(self._roots) >= _ROOTS_KEPT:
                    self._roots.clear()
                self._roots[name] = root
        return KeyScope(parsed.model or info.model, root, info.block_size or 0)


def _is_too_long(job: Job) -> bool:
    """Tell whether no engine can take so many token ids; keys of millions would take long."""
    count = len(job.parsed.token_ids)
    return bool(count) and all(
        view.info.max_model_len is not None and count > view.info.max_model_len
        for view in job.views
    )
