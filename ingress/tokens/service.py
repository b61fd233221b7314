"""The token service: a request in, block keys out, with at most one tokenization.

Order: remembered prompt, remembered text prefix (only the tail is tokenized), then one
question to one engine (``/render``, else ``/tokenize``), then the local tokenizer. A question
that failed is not asked of another engine: the request is then routed without token keys.

Requests of ``/v1/responses`` and ``/v1/messages`` are rendered by engines that offer it. Where
none does, they are tokenized as the chat they amount to, and their keys are not exact.

Tokenizing a tail alone relies on the cut rule of ``alignment``. It is used for a model only
after that model's engine has passed a probe, once, in the background.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from nearkv.block_keys import TOKEN_BYTES, chain_keys, pack_tokens
from nearkv.ingress.errors import TokenizationError
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.tokens.alignment import align_tokens, find_cut
from nearkv.ingress.tokens.converting import chat_of, in_plain_text
from nearkv.ingress.tokens.engine_tokenizer import EngineRef, EngineTokenizer, Tokenized
from nearkv.ingress.tokens.local_tokenizer import LocalTokenizer
from nearkv.ingress.tokens.memo import (
    STEP_BYTES,
    KnownPrefix,
    PrefixMemo,
    PromptKeys,
    PromptMemo,
    TokenizedText,
    step_hashes,
)

_PROBE_TEXTS = (
    "The node 7 agent reads metrics, then moves blocks",
    "def f(x):\n    return x + 10 if x else None  # why not",
    "Ünïcode wörds 3 and numbers 12345 stay apart here",
)
_LONG_TEXT_BYTES = 2 * STEP_BYTES
_QUICK = 16 << 10
_MOST_LOCAL = 2 << 20
_CHAT_FIELDS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
)

_CONVERTED = frozenset({PromptKind.RESPONSES, PromptKind.MESSAGES})
_RENDER = "render"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What turns tokens into keys: the namespace's root key and the block size."""

    model: str
    root: int
    block_size: int


class TokenService:
    """Turns requests into block keys, remembering what was tokenized."""

    def __init__(
        self,
        engines: EngineTokenizer,
        local: Mapping[str, LocalTokenizer],
        *,
        order: tuple[str, ...],
        memo_bytes: int,
    ) -> None:
        self._engines = engines
        self._local = local
        self._order = order
        self._prompts = PromptMemo(limit_bytes=memo_bytes // 2)
        self._texts = PrefixMemo(limit_bytes=memo_bytes // 2)
        self._cuttable: dict[str, bool | None] = {}
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def memo_bytes(self) -> int:
        """Estimated memory of what is remembered."""
        return self._prompts.size_bytes + self._texts.size_bytes

    async def keys_of(
        self,
        request: GenerateRequest,
        body: bytes,
        path: str,
        *,
        scope: KeyScope,
        engine: EngineRef,
    ) -> PromptKeys:
        """Return a request's block keys; raises :class:`TokenizationError`."""
        known = self.recall(request, scope)
        if known is not None:
            return known
        if (
            request.kind is PromptKind.TEXT
            and request.plain
            and len(request.text) >= _LONG_TEXT_BYTES
            and self._can_spell(scope.model, engine)
        ):
            found = await self._keys_of_text(request.text, scope, engine)
        else:
            tokenized, source = await self._tokenize(request, body, path, scope.model, engine)
            found = _keyed(pack_tokens(tokenized.token_ids), scope, source=source)
            if not _is_exact(request, source):
                found = msgspec.structs.replace(found, exact=False)
        remembered = msgspec.structs.replace(found, source="memo")
        self._prompts.put(_memo_key(request, scope), remembered)
        return found

    def recall(self, request: GenerateRequest, scope: KeyScope) -> PromptKeys | None:
        """Return a request's block keys where that takes no tokenization."""
        if request.kind is PromptKind.TOKENS:
            return _keyed(pack_tokens(request.token_ids), scope, source="ids")
        return self._prompts.get(_memo_key(request, scope))

    def forget(self, known: set[tuple[str, str]]) -> None:
        """Drop what was learnt of engines and incarnations no longer known."""
        self._engines.forget(known)

    def close(self) -> None:
        """Stop background probes."""
        for task in self._probes:
            task.cancel()

    # -- Long texts --------------------------------------------------------------------

    async def _keys_of_text(self, text: str, scope: KeyScope, engine: EngineRef) -> PromptKeys:
        raw = text.encode()
        steps = step_hashes(hash(scope.model) & 0xFFFFFFFF, raw)
        prefix = self._texts.find(raw, steps) if self._can_cut(scope.model, engine) else None
        if prefix is None:
            tokenized, source = await self._tokenize_spelled(text, scope.model, engine)
            packed = pack_tokens(tokenized.token_ids)
            ends = tokenized.token_strs and align_tokens(raw, tokenized.token_strs)
            found = _keyed(packed, scope, source=source)
        else:
            tail = raw[prefix.text_bytes :]
            tokenized = await self._tokenize_tail(tail.decode(), scope.model, engine)
            packed = prefix.packed_tokens + pack_tokens(tokenized.token_ids)
            ends = _extend(prefix, tail, tokenized)
            found = _keyed(packed, scope, source="prefix", known=prefix)
        if ends:
            entry = TokenizedText(
                raw, packed, ends, scope.root, scope.block_size, found.keys, steps
            )
            self._texts.put(entry, extends=prefix.entry if prefix else None)
        return found

    def _can_spell(self, model: str, engine: EngineRef) -> bool:
        """Tell whether a source is left that says how tokens are spelled, as /render does not."""
        return self._asks_tokenize(engine) or ("local" in self._order and model in self._local)

    def _asks_tokenize(self, engine: EngineRef) -> bool:
        return "tokenize" in self._order and self._engines.offers(engine, "/tokenize")

    async def _tokenize_spelled(
        self, text: str, model: str, engine: EngineRef
    ) -> tuple[Tokenized, str]:
        """Tokenize a whole text with spelling, which only /tokenize and local can give."""
        question = {"model": model, "prompt": text}
        if self._asks_tokenize(engine):
            return await self._engines.tokenize(engine, question, spelled=True), "tokenize"
        tokenizer = self._local_tokenizer(model)
        return await _locally(len(text), lambda: tokenizer.tokenize_text(text)), "local"

    async def _tokenize_tail(self, tail: str, model: str, engine: EngineRef) -> Tokenized:
        if self._asks_tokenize(engine):
            question = {"model": model, "prompt": tail, "add_special_tokens": False}
            return await self._engines.tokenize(engine, question, spelled=True)
        tokenizer = self._local_tokenizer(model)
        return await _locally(len(tail), lambda: tokenizer.tokenize_tail(tail))

    def _can_cut(self, model: str, engine: EngineRef) -> bool:
        """Tell whether the model's tokenizer passed the probe; starts it at first sight."""
        if model not in self._cuttable:
            self._cuttable[model] = None
            task = asyncio.create_task(self._probe_cut(model, engine))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)
        return self._cuttable[model] is True

    async def _probe_cut(self, model: str, engine: EngineRef) -> None:
        """Check that texts cut by the rule tokenize to the same tokens as uncut ones."""
        try:
            passed = True
            for text in _PROBE_TEXTS:
                whole, _ = await self._tokenize_spelled(text, model, engine)
                passed = passed and await self._cuts_well(text, whole, model, engine)
        except TokenizationError as error:
            del self._cuttable[model]
            log.info("tokenizer_probe_failed", model=model, error=str(error))
            return
        self._cuttable[model] = passed
        log.info("tokenizer_probed", model=model, tail_only=passed)

    async def _cuts_well(self, text: str, whole: Tokenized, model: str, engine: EngineRef) -> bool:
        raw = text.encode()
        ends = align_tokens(raw, whole.token_strs or [])
        cut = ends and find_cut(raw, ends, len(raw))
        if not ends or not cut:
            return False
        tail = await self._tokenize_tail(raw[ends[cut - 1] :].decode(), model, engine)
        return whole.token_ids == whole.token_ids[:cut] + tail.token_ids

    # -- Whole prompts -----------------------------------------------------------------

    async def _tokenize(
        self, request: GenerateRequest, body: bytes, path: str, model: str, engine: EngineRef
    ) -> tuple[Tokenized, str]:
        """Ask the first source in order that offers an answer."""
        for source in self._order:
            if source == "local":
                if model in self._local:
                    tokenize = partial(self._tokenize_locally, request, body, model)
                    return await _locally(len(body), tokenize), source
                continue
            asked = f"{path}/render" if source == _RENDER else "/tokenize"
            if not self._engines.offers(engine, asked):
                continue
            try:
                if source == _RENDER:
                    return await self._engines.render(engine, path, body), source
                question = _question(request, body, model)
                return await self._engines.tokenize(engine, question), source
            except TokenizationError:
                if self._engines.offers(engine, asked):
                    raise  # it failed; where it was declined, the next source is asked
        raise TokenizationError("no source of token ids is left")

    def _tokenize_locally(self, request: GenerateRequest, body: bytes, model: str) -> Tokenized:
        tokenizer = self._local_tokenizer(model)
        if request.kind in _CONVERTED:
            return tokenizer.tokenize_chat(in_plain_text(chat_of(request.kind, body)))
        if request.kind is PromptKind.CHAT:
            try:
                chat = msgspec.json.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise TokenizationError(f"the chat cannot be read: {error}") from error
            return tokenizer.tokenize_chat(chat)
        return tokenizer.tokenize_text(request.text)

    def _local_tokenizer(self, model: str) -> LocalTokenizer:
        tokenizer = self._local.get(model)
        if tokenizer is None:
            raise TokenizationError("no source of token ids is left")
        return tokenizer


def _check_size(size: int) -> None:
    if size > _MOST_LOCAL:
        raise TokenizationError(f"{size} characters are too many to be looked at here")


async def _locally(size: int, tokenize: Callable[[], Tokenized]) -> Tokenized:
    """Tokenize in this process; what takes long must not hold up all other requests.

    A megabyte takes a thread about a second. Raises :class:`TokenizationError` beyond a bound.
    """
    _check_size(size)
    return tokenize() if size <= _QUICK else await asyncio.to_thread(tokenize)


def _question(request: GenerateRequest, body: bytes, model: str) -> Mapping[str, object]:
    """Put the question for /tokenize: the prompt, or what bears on a chat's rendering."""
    if request.kind in _CONVERTED:
        _check_size(len(body))
        return {"model": model} | chat_of(request.kind, body)
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if request.kind is PromptKind.CHAT:
        return {"model": model} | {name: fields[name] for name in _CHAT_FIELDS if name in fields}
    # Of several prompts in one request, ``text`` is the one that counts.
    question: dict[str, object] = {"model": model, "prompt": request.text}
    if "add_special_tokens" in fields:
        question["add_special_tokens"] = fields["add_special_tokens"]
    return question


def _is_exact(request: GenerateRequest, source: str) -> bool:
    """Tell whether the tokens are those that the engine sees."""
    converted = request.kind in _CONVERTED and source != _RENDER
    return not converted and not request.may_render_otherwise


def _memo_key(request: GenerateRequest, scope: KeyScope) -> bytes:
    return b"%d:%d:" % (scope.root, scope.block_size) + request.digest


def _keyed(
    packed: bytes, scope: KeyScope, *, source: str, known: KnownPrefix | None = None
) -> PromptKeys:
    """Chain the keys of packed tokens, going on from a known prefix's where there is one."""
    keys = array("Q")
    if known is not None:
        entry = known.entry
        if (entry.root, entry.block_size) == (scope.root, scope.block_size):
            keys.extend(entry.keys[: known.token_count // scope.block_size])
    parent = keys[-1] if keys else scope.root
    rest = packed[len(keys) * scope.block_size * TOKEN_BYTES :]
    keys.extend(chain_keys(parent, rest, scope.block_size))
    return PromptKeys(len(packed) // TOKEN_BYTES, keys, source)


def _extend(prefix: KnownPrefix, tail: bytes, tokenized: Tokenized) -> "array[int] | None":
    """Return the alignment of known prefix and tail together."""
    tail_ends = align_tokens(tail, tokenized.token_strs or [])
    if tail_ends is None:
        return None
    ends = prefix.entry.ends[: prefix.token_count]
    ends.extend(prefix.text_bytes + end for end in tail_ends)
    return ends
