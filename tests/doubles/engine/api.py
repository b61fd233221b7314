"""HTTP endpoints of the double on a bare aiohttp server.

No router, middleware or access log: the double also serves benchmarks, where its own cost per
request must stay small.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from aiohttp import web

from tests.doubles.engine import answers
from tests.doubles.engine.admin import EngineAdmin
from tests.doubles.engine.answers import CHAT, COMPLETION, AnswerFormat, Answering, encode
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.faults import NO_FAULTS, Faults, FaultState
from tests.doubles.engine.generating import Generator
from tests.doubles.engine.other_apis import RESPONSES, OtherApis
from tests.doubles.engine.ranks import QueueTimeoutError, Rank
from tests.doubles.engine.recording import ReceivedRequest, RequestRecord
from tests.doubles.engine.replying import (
    STREAM_HEADERS,
    Call,
    ChunkWriter,
    error_response,
    hang_up,
    json_response,
    status_error,
)
from tests.doubles.engine.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    GenerationRequest,
    MessagesRequest,
    RequestDecoder,
    ResponsesRequest,
    TokenizeRequest,
)
from tests.doubles.engine.tokenizing import ChatOptions, Prompt, PromptTokenizer

Handler = Callable[[Call], Awaitable[web.StreamResponse]]
PlainHandler = Callable[[], web.Response]

_PREFIXES: dict[type, str] = {
    ChatRequest: CHAT.id_prefix,
    MessagesRequest: CHAT.id_prefix,
    ResponsesRequest: "resp_",
}
_LOAD_FORMAT = "endpoint-load-metrics-format"


class Inject(Protocol):
    """Puts faults in force, leaving the connection that asked for them open."""

    def __call__(self, faults: Faults, *, spared: asyncio.BaseTransport | None) -> Awaitable[None]:
        """Return once they are."""


class EngineApi:
    """Answers the requests of one incarnation of the engine."""

    def __init__(
        self,
        config: EngineDoubleConfig,
        *,
        ranks: list[Rank],
        tokenizer: PromptTokenizer,
        record: RequestRecord,
        faults: FaultState,
        inject: Inject,
        started_at: float,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._tokenizer = tokenizer
        self._record = record
        self._faults = faults
        self._inject = inject
        self._started_at = started_at
        self._generator = Generator(config, tokenizer=tokenizer, ranks=ranks)
        self._admin = admin = EngineAdmin(
            config, ranks=ranks, generator=self._generator, started_at=started_at
        )
        self._decoder = RequestDecoder()
        self._other = OtherApis(
            config, tokenizer=tokenizer, generator=self._generator, render=self._render_other
        )
        self._handlers: dict[str, tuple[str, Handler]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions/render": ("POST", self._render_completions),
            "/v1/chat/completions/render": ("POST", self._render_chat),
            "/v1/embeddings": ("POST", self._embeddings),
            "/inference/v1/generate": ("POST", self._generate),
            "/tokenize": ("POST", self._tokenize),
            "/sleep": ("POST", admin.sleep),
            "/v1/load_lora_adapter": ("POST", admin.load_adapter),
            "/v1/unload_lora_adapter": ("POST", admin.unload_adapter),
        }
        if config.other_apis:
            self._handlers |= self._other_handlers()
        self._plain_handlers: dict[str, tuple[str, PlainHandler]] = {
            "/v1/models": ("GET", admin.models),
            "/health": ("GET", admin.health),
            "/version": ("GET", admin.version),
            "/load": ("GET", admin.load),
            "/metrics": ("GET", admin.metrics),
            "/kv_event_sources": ("GET", admin.event_sources),
            "/reset_prefix_cache": ("POST", admin.reset_prefix_cache),
            "/wake_up": ("POST", admin.wake_up),
        }

    def _other_handlers(self) -> dict[str, tuple[str, Handler]]:
        other = self._other
        handlers: dict[str, tuple[str, Handler]] = {
            "/v1/responses": ("POST", other.responses),
            "/v1/messages": ("POST", other.messages),
            "/v1/messages/count_tokens": ("POST", other.count_tokens),
        }
        if self._config.render_other_apis:
            handlers["/v1/responses/render"] = ("POST", other.render_responses)
            handlers["/v1/messages/render"] = ("POST", other.render_messages)
        return handlers

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; the entry point of the server."""
        call = Call(request, await request.read() if request.body_exists else b"")
        if request.path.startswith("/double/"):
            return await self._control(call)
        self._record.add(ReceivedRequest(request.method, request.path, request.headers, call.body))
        try:
            return await self._misbehave(call) or await self._dispatch(call)
        except ApiError as error:
            return error_response(error)
        except QueueTimeoutError:
            return error_response(status_error(HTTPStatus.SERVICE_UNAVAILABLE))
        except asyncio.CancelledError:
            self._record.aborted += 1
            raise
        except ConnectionError:
            # Nobody is left to answer; aiohttp drops what is returned.
            self._record.aborted += 1
            hang_up(request)
            return web.Response()

    async def _dispatch(self, call: Call) -> web.StreamResponse:
        path, method = call.request.path, call.request.method
        expected, handler = self._handlers.get(path, ("", None))
        if handler is not None and expected == method:
            return await handler(call)
        plain_expected, plain = self._plain_handlers.get(path, ("", None))
        if plain is not None and plain_expected == method:
            return plain()
        if self._config.other_apis and path.startswith(f"{RESPONSES}/"):
            return await self._other.stored_response(call)
        known = handler or plain
        raise status_error(HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND)

    async def _control(self, call: Call) -> web.StreamResponse:
        match call.request.method, call.request.path:
            case "GET", "/double/requests":
                return json_response(self._record.as_json())
            case "DELETE", "/double/requests":
                self._record.clear()
                return web.Response(status=204)
            case "POST", "/double/faults":
                return await self._set_faults(call)
        return error_response(status_error(HTTPStatus.NOT_FOUND))

    async def _misbehave(self, call: Call) -> web.StreamResponse | None:
        faults = self._faults.for_request(call.request.path)
        if faults is NO_FAULTS:
            return None
        if faults.hang_seconds > 0:
            await asyncio.sleep(faults.hang_seconds)
        if faults.close_before_first_byte:
            hang_up(call.request)
            return web.Response()
        if faults.answer_status is not None:
            raise status_error(HTTPStatus(faults.answer_status))
        call.chunks_until_death = faults.die_after_chunks
        call.faults = faults
        return None

    async def _completions(self, call: Call) -> web.StreamResponse:
        wanted = self._decoder.decode(call.body, CompletionRequest)
        self._generator.adapter(wanted.model)
        prompts = self._completion_prompts(wanted)
        return await self._answer(call, wanted, prompts, wanted.max_tokens, COMPLETION)

    async def _chat(self, call: Call) -> web.StreamResponse:
        wanted = self._decoder.decode(call.body, ChatRequest)
        self._generator.adapter(wanted.model)
        asked = wanted.max_completion_tokens
        max_tokens = wanted.max_tokens if asked is None else asked
        return await self._answer(call, wanted, [self._conversation(wanted)], max_tokens, CHAT)

    async def _answer(
        self,
        call: Call,
        wanted: GenerationRequest,
        prompts: list[Prompt],
        max_tokens: int | None,
        form: AnswerFormat,
    ) -> web.StreamResponse:
        _act_on_transfer(call.faults, wanted)
        rank = self._generator.pick_rank(call.request.headers)
        with self._generator.answering(
            wanted,
            rank=rank,
            prompts=prompts,
            scope=self._generator.scope(wanted),
            max_tokens=max_tokens,
            request_id=_request_id(call.request, form.id_prefix),
        ) as answering:
            if wanted.stream:
                return await self._stream(call, wanted, rank, answering, form)
            await self._generator.serve(answering, wanted, rank=rank)
            return json_response(
                form.whole(answering),
                headers=self._admin.load_headers(call.request.headers.get(_LOAD_FORMAT)),
            )

    async def _stream(
        self,
        call: Call,
        wanted: GenerationRequest,
        rank: Rank,
        answering: Answering,
        form: AnswerFormat,
    ) -> web.StreamResponse:
        await rank.prefill(answering.jobs[0])
        response = web.StreamResponse(
            headers=STREAM_HEADERS
            | self._admin.load_headers(call.request.headers.get(_LOAD_FORMAT))
        )
        await response.prepare(call.request)
        chunks = ChunkWriter(call, response)
        for chunk in form.opening(answering):
            await chunks.write(encode(chunk))
        for index, job in enumerate(answering.jobs):
            if job.produced == 0:
                await rank.prefill(job)
            last = len(job.reply_tokens) - 1
            for position, text in enumerate(answering.pieces[index]):
                if position > 0:
                    await rank.decode(job, 1)
                reason = "length" if position == last else None
                piece = form.piece(answering, index=index, text=text, finish_reason=reason)
                await chunks.write(encode(piece))
            self._generator.complete(answering, wanted, rank=rank, job=job)
        if wanted.stream_options is not None and wanted.stream_options.include_usage:
            await chunks.write(encode(form.closing(answering)))
        await chunks.write(b"[DONE]")
        await response.write_eof()
        return response

    async def _generate(self, call: Call) -> web.StreamResponse:
        self._require_scale_out()
        wanted = self._decoder.decode(call.body, GenerateRequest)
        if wanted.stream:
            raise ApiError(400, "the double does not stream token ids", "BadRequestError")
        rank = self._generator.pick_rank(call.request.headers)
        with self._generator.answering(
            wanted,
            rank=rank,
            prompts=[Prompt(wanted.token_ids)],
            scope=self._generator.scope(wanted),
            max_tokens=wanted.sampling_params.max_tokens,
            request_id=_request_id(call.request, "generate-tokens-"),
        ) as answering:
            await self._generator.serve(answering, wanted, rank=rank)
            return json_response(answers.generated_ids(answering))

    async def _render_completions(self, call: Call) -> web.StreamResponse:
        self._require_scale_out()
        wanted = self._decoder.decode(call.body, CompletionRequest)
        self._generator.adapter(wanted.model)
        prompts = self._completion_prompts(wanted)
        return json_response(
            [
                self._rendered(call, wanted, prompt=prompt, max_tokens=wanted.max_tokens)
                for prompt in prompts
            ]
        )

    async def _render_chat(self, call: Call) -> web.StreamResponse:
        self._require_scale_out()
        wanted = self._decoder.decode(call.body, ChatRequest)
        self._generator.adapter(wanted.model)
        prompt = self._conversation(wanted)
        asked = wanted.max_completion_tokens or wanted.max_tokens
        # A chat may by default fill the rest of the context, and its rendering says so.
        max_tokens = asked or self._config.context_tokens - len(prompt.tokens)
        return json_response(self._rendered(call, wanted, prompt=prompt, max_tokens=max_tokens))

    def _render_other(
        self, call: Call, wanted: GenerationRequest, prompt: Prompt, max_tokens: int | None
    ) -> web.StreamResponse:
        self._require_scale_out()
        return json_response(self._rendered(call, wanted, prompt=prompt, max_tokens=max_tokens))

    def _rendered(
        self,
        call: Call,
        wanted: GenerationRequest,
        *,
        prompt: Prompt,
        max_tokens: int | None,
    ) -> dict[str, Any]:
        self._generator.reply_tokens(prompt, max_tokens)
        sampling = {
            "max_tokens": max_tokens,
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
        }
        prefix = _PREFIXES.get(type(wanted), COMPLETION.id_prefix)
        return answers.rendered(
            request_id=_request_id(call.request, prefix),
            token_ids=prompt.tokens,
            model=wanted.model or self._config.model,
            asked={
                "sampling": {key: value for key, value in sampling.items() if value is not None},
                "stream": bool(wanted.stream),
                "cache_salt": wanted.cache_salt,
                "kv_transfer_params": wanted.kv_transfer_params,
            },
        )

    async def _embeddings(self, call: Call) -> web.StreamResponse:
        wanted = self._decoder.decode(call.body, EmbeddingRequest)
        self._generator.adapter(wanted.model)
        prompts = self._generator.prompts(wanted.input)
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        size = self._config.embedding_size
        data = [
            {"index": index, "object": "embedding", "embedding": _embedding(prompt.seed, size)}
            for index, prompt in enumerate(prompts)
        ]
        usage = {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        return json_response(
            {
                "id": _request_id(call.request, "embd-"),
                "object": "list",
                "created": int(self._started_at),
                "model": wanted.model or self._config.model,
                "data": data,
                "usage": usage,
            }
        )

    async def _tokenize(self, call: Call) -> web.StreamResponse:
        wanted = self._decoder.decode(call.body, TokenizeRequest)
        self._generator.adapter(wanted.model)
        asked = wanted.add_special_tokens
        if wanted.prompt is not None:
            prompt = self._tokenizer.text(
                wanted.prompt, add_special_tokens=True if asked is None else asked
            )
        elif wanted.messages:
            prompt = self._conversation(wanted)
        else:
            raise ApiError(400, "either prompt or messages is needed", "Bad Request")
        tokens = prompt.tokens
        strings = self._tokenizer.token_strings(tokens) if wanted.return_token_strs else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": self._config.context_tokens,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def _set_faults(self, call: Call) -> web.StreamResponse:
        try:
            faults = msgspec.json.decode(call.body, type=Faults)
        except msgspec.DecodeError as error:
            return json_response({"error": str(error)}, status=400)
        await self._inject(faults, spared=call.request.transport)
        response = web.Response(status=204)
        response.force_close()
        return response

    def _completion_prompts(self, wanted: CompletionRequest) -> list[Prompt]:
        return self._generator.prompts(wanted.prompt, add_special_tokens=wanted.add_special_tokens)

    def _conversation(self, wanted: ChatRequest | TokenizeRequest) -> Prompt:
        extra: dict[str, Any] = {}
        if wanted.tools:
            extra["tools"] = wanted.tools
        if wanted.chat_template_kwargs:
            extra |= msgspec.json.decode(wanted.chat_template_kwargs, type=dict[str, Any])
        options = ChatOptions(
            add_generation_prompt=wanted.add_generation_prompt,
            add_special_tokens=bool(wanted.add_special_tokens),
            extra=encode(extra) if extra else b"",
        )
        try:
            return self._tokenizer.chat(bytes(wanted.messages), options)
        except ValueError as error:
            raise ApiError(400, str(error), "BadRequestError", param="messages") from error

    def _require_scale_out(self) -> None:
        if not self._config.scale_out:
            raise status_error(HTTPStatus.FORBIDDEN)


def _act_on_transfer(faults: Faults, wanted: GenerationRequest) -> None:
    """Act out the faults about moving KV."""
    params = wanted.kv_transfer_params or {}
    if faults.reject_transfer_params and params.get("do_remote_prefill"):
        raise ApiError(400, "kv_transfer_params: unknown keys", "BadRequestError")
    if faults.withhold_transfer_params:
        wanted.kv_transfer_params = None


def _request_id(request: web.BaseRequest, prefix: str) -> str:
    return prefix + (request.headers.get("X-Request-Id") or f"{random.getrandbits(64):016x}")


def _embedding(seed: int, size: int) -> list[float]:
    return [((seed >> (index % 57)) % 251 - 125) / 125 for index in range(size)]
