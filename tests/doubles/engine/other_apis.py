"""``/v1/responses`` and ``/v1/messages`` of the double: text only, no tools.

Responses are kept where ``store_responses`` says so, in this incarnation's memory.
"""

import random
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from tests.doubles.engine.answers import Answering, Body
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.generating import Generator
from tests.doubles.engine.other_answers import MessagesFormat, ResponsesFormat
from tests.doubles.engine.ranks import Rank
from tests.doubles.engine.replying import STREAM_HEADERS, Call, ChunkWriter, json_response
from tests.doubles.engine.requests import (
    ApiError,
    GenerationRequest,
    MessagesRequest,
    RequestDecoder,
    ResponsesRequest,
)
from tests.doubles.engine.tokenizing import ChatOptions, Prompt, PromptTokenizer

RESPONSES = "/v1/responses"
Render = Callable[[Call, GenerationRequest, Prompt, int | None], web.StreamResponse]
Messages = list[dict[str, Any]]

_NOT_IN_PROMPTS = "x-anthropic-billing-header"


class OtherApis:
    """Handlers of the APIs beside completions and chats."""

    def __init__(
        self,
        config: EngineDoubleConfig,
        *,
        tokenizer: PromptTokenizer,
        generator: Generator,
        render: Render,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._generator = generator
        self._render = render
        self._decoder = RequestDecoder()
        self._stored: dict[str, tuple[Messages, Body]] = {}

    # -- /v1/responses -----------------------------------------------------------------

    async def responses(self, call: Call) -> web.StreamResponse:
        """``POST /v1/responses``."""
        wanted = self._decoder.decode(call.body, ResponsesRequest)
        self._generator.adapter(wanted.model)
        said = self._said(wanted)
        form = ResponsesFormat(wanted, block_size=self._config.block_size)
        prompt = self._prompt(_with_system(wanted.instructions, said))
        rank = self._generator.pick_rank(call.request.headers)
        with self._generator.answering(
            wanted,
            rank=rank,
            prompts=[prompt],
            scope=self._generator.scope(wanted),
            max_tokens=wanted.max_output_tokens,
            request_id=wanted.request_id or f"resp_{some_id()}",
        ) as answering:
            response = await self._answer(call, wanted, rank, answering, form)
            if self._config.store_responses and wanted.store:
                reply = {"role": "assistant", "content": answering.text(0)}
                self._stored[answering.id] = (
                    [*said, reply],
                    form.body(answering, "incomplete"),
                )
            return response

    async def stored_response(self, call: Call) -> web.StreamResponse:
        """``GET /v1/responses/{id}``, ``POST /v1/responses/{id}/cancel``."""
        response_id, _, verb = call.request.path[len(RESPONSES) + 1 :].partition("/")
        _, body = self._earlier(response_id)
        if verb:
            raise _refused(HTTPStatus.BAD_REQUEST, "Cannot cancel a synchronous response.")
        return json_response(body)

    async def render_responses(self, call: Call) -> web.StreamResponse:
        """``POST /v1/responses/render``."""
        wanted = self._decoder.decode(call.body, ResponsesRequest)
        self._generator.adapter(wanted.model)
        if wanted.previous_response_id is not None:
            what = "previous_response_id"
            message = f"{what} is not supported by the stateless render endpoint."
            raise _refused(HTTPStatus.BAD_REQUEST, message, param=what)
        prompt = self._prompt(_with_system(wanted.instructions, self._said(wanted)))
        return self._render(call, wanted, prompt, wanted.max_output_tokens)

    def _said(self, wanted: ResponsesRequest) -> Messages:
        earlier: Messages = []
        if wanted.previous_response_id is not None:
            earlier, _ = self._earlier(wanted.previous_response_id)
        if isinstance(wanted.input, str):
            return [*earlier, {"role": "user", "content": wanted.input}]
        return [*earlier, *wanted.input]

    def _earlier(self, response_id: str) -> tuple[Messages, Body]:
        found = self._stored.get(response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise _refused(HTTPStatus.NOT_FOUND, message)
        return found

    # -- /v1/messages ------------------------------------------------------------------

    async def messages(self, call: Call) -> web.StreamResponse:
        """``POST /v1/messages``."""
        wanted = self._decoder.decode(call.body, MessagesRequest)
        return await _in_its_envelope(self._messages(call, wanted))

    async def _messages(self, call: Call, wanted: MessagesRequest) -> web.StreamResponse:
        self._generator.adapter(wanted.model)
        prompt = self._prompt(_with_system(wanted.system, wanted.messages))
        rank = self._generator.pick_rank(call.request.headers)
        with self._generator.answering(
            wanted,
            rank=rank,
            prompts=[prompt],
            scope=self._generator.scope(wanted),
            max_tokens=wanted.max_tokens,
            request_id=f"chatcmpl-{some_id()}",
        ) as answering:
            form = MessagesFormat(block_size=self._config.block_size)
            return await self._answer(call, wanted, rank, answering, form)

    async def count_tokens(self, call: Call) -> web.StreamResponse:
        """``POST /v1/messages/count_tokens``."""
        wanted = self._decoder.decode(call.body, MessagesRequest)
        self._generator.adapter(wanted.model)
        count = len(self._prompt(_with_system(wanted.system, wanted.messages)).tokens)
        return json_response(
            {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        )

    async def render_messages(self, call: Call) -> web.StreamResponse:
        """``POST /v1/messages/render``; its errors come in OpenAI's envelope."""
        wanted = self._decoder.decode(call.body, MessagesRequest)
        self._generator.adapter(wanted.model)
        prompt = self._prompt(_with_system(wanted.system, wanted.messages))
        return self._render(call, wanted, prompt, wanted.max_tokens)

    # -- Both --------------------------------------------------------------------------

    def _prompt(self, messages: Messages) -> Prompt:
        try:
            return self._tokenizer.chat(msgspec.json.encode(messages), ChatOptions())
        except ValueError as error:
            raise ApiError(400, str(error), "BadRequestError") from error

    async def _answer(
        self,
        call: Call,
        wanted: GenerationRequest,
        rank: Rank,
        answering: Answering,
        form: ResponsesFormat | MessagesFormat,
    ) -> web.StreamResponse:
        if wanted.stream:
            return await self._stream(call, wanted, rank, answering, form)
        await self._generator.serve(answering, wanted, rank=rank)
        if isinstance(form, MessagesFormat):
            return json_response(form.whole(answering))
        return json_response(form.body(answering, "incomplete"))

    async def _stream(
        self,
        call: Call,
        wanted: GenerationRequest,
        rank: Rank,
        answering: Answering,
        form: ResponsesFormat | MessagesFormat,
    ) -> web.StreamResponse:
        (job,) = answering.jobs
        await rank.prefill(job)
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(call.request)
        chunks = ChunkWriter(call, response)
        number = 0
        for event in form.opening(answering):
            await chunks.write_raw(form.event(number, event))
            number += 1
        for position, text in enumerate(answering.pieces[0]):
            if position > 0:
                await rank.decode(job, 1)
            await chunks.write_raw(form.event(number, form.piece(text)))
            number += 1
        self._generator.complete(answering, wanted, rank=rank, job=job)
        for event in form.closing(answering):
            await chunks.write_raw(form.event(number, event))
            number += 1
        await response.write_eof()
        return response


def some_id() -> str:
    """Return 16 hexadecimal digits."""
    return f"{random.getrandbits(64):016x}"


def _with_system(system: Any, messages: Messages) -> Messages:
    if isinstance(system, list):
        texts = (block["text"] for block in system)
        system = "".join(text for text in texts if not text.startswith(_NOT_IN_PROMPTS))
    return [{"role": "system", "content": system}, *messages] if system else messages


async def _in_its_envelope(answer: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    try:
        return await answer
    except ApiError as error:
        told = {"type": error.kind, "message": error.message}
        return json_response({"type": "error", "error": told}, status=error.status)


def _refused(status: HTTPStatus, message: str, *, param: str = "response_id") -> ApiError:
    return ApiError(status.value, message, "invalid_request_error", param=param)
