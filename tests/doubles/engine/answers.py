"""Bodies of the answers, shaped like vLLM 0.32's; pure.

Keys that are always null in the captures stay null here: clients must cope with them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.publishing import SEND_LIMIT_MESSAGES
from tests.doubles.engine.ranks import Job, Rank
from tests.doubles.engine.requests import ApiError

Body = dict[str, Any]

_ENCODER = msgspec.json.Encoder()
_REMOTE_PORT = 5600
_ENGINE_KEYS = ("do_remote_decode", "do_remote_prefill")


def encode(body: object) -> bytes:
    """Return compact JSON."""
    return _ENCODER.encode(body)


@dataclass(slots=True)
class Answering:
    """One generation request being answered: its prompts, in order, and their texts."""

    id: str
    created: int
    model: str
    fingerprint: str
    jobs: list[Job]
    pieces: list[list[str]]
    with_details: bool
    kv_transfer_params: Body | None = None

    def text(self, index: int) -> str:
        """Return the whole answer to one prompt."""
        return "".join(self.pieces[index])

    def usage(self, created_cache_tokens: int | None, *, is_stream: bool = False) -> Body:
        """Return token counts over all prompts; a stream leaves the multimodal count out."""
        prompt_tokens = sum(len(job.prompt.tokens) for job in self.jobs)
        produced = sum(job.produced for job in self.jobs)
        details = None
        if self.with_details:
            details = {
                "cached_tokens": sum(job.cached_tokens for job in self.jobs),
                "created_cache_tokens": created_cache_tokens,
            } | ({} if is_stream else {"multimodal_tokens": None})
        usage: Body = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + produced,
            "completion_tokens": produced,
            "prompt_tokens_details": details,
        }
        return usage if is_stream else usage | {"completion_tokens_details": None}


class AnswerFormat(Protocol):
    """How one endpoint writes an answer, whole or in pieces."""

    id_prefix: str

    def whole(self, answering: Answering) -> Body:
        """Return the body of a plain answer."""

    def opening(self, answering: Answering) -> Iterator[Body]:
        """Yield what a stream sends before any text."""

    def piece(
        self, answering: Answering, *, index: int, text: str, finish_reason: str | None
    ) -> Body:
        """Return one streamed piece of text."""

    def closing(self, answering: Answering) -> Body:
        """Return the streamed usage."""


class CompletionFormat:
    """``/v1/completions``."""

    id_prefix = "cmpl-"

    def whole(self, answering: Answering) -> Body:
        """Return the body of a plain answer."""
        return {
            "id": answering.id,
            "object": "text_completion",
            "created": answering.created,
            "model": answering.model,
            "choices": [self._choice(answering, index) for index in range(len(answering.jobs))],
            "service_tier": None,
            "system_fingerprint": answering.fingerprint,
            "usage": answering.usage(None),
            "kv_transfer_params": answering.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, answering: Answering) -> Iterator[Body]:
        """Yield nothing: completions start with text."""
        del answering
        yield from ()

    def piece(
        self, answering: Answering, *, index: int, text: str, finish_reason: str | None
    ) -> Body:
        """Return one streamed piece of text."""
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        return self._chunk(answering) | {"choices": [choice]}

    def closing(self, answering: Answering) -> Body:
        """Return the streamed usage."""
        usage = answering.usage(None, is_stream=True)
        return self._chunk(answering) | {"choices": [], "usage": usage}

    def _chunk(self, answering: Answering) -> Body:
        return {
            "id": answering.id,
            "object": "text_completion",
            "created": answering.created,
            "model": answering.model,
        }

    def _choice(self, answering: Answering, index: int) -> Body:
        return {
            "index": index,
            "text": answering.text(index),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }


class ChatFormat:
    """``/v1/chat/completions``; here created_cache_tokens is 0, in completions null."""

    id_prefix = "chatcmpl-"

    def whole(self, answering: Answering) -> Body:
        """Return the body of a plain answer."""
        return {
            "id": answering.id,
            "object": "chat.completion",
            "created": answering.created,
            "model": answering.model,
            "choices": [self._choice(answering)],
            "service_tier": None,
            "system_fingerprint": answering.fingerprint,
            "usage": answering.usage(0),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": answering.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, answering: Answering) -> Iterator[Body]:
        """Yield the chunk that names the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        nulls = {"prompt_token_ids": None, "prompt_text": None}
        yield self._chunk(answering) | {"choices": [choice]} | nulls

    def piece(
        self, answering: Answering, *, index: int, text: str, finish_reason: str | None
    ) -> Body:
        """Return one streamed piece of text; only the last tells a stop reason."""
        choice: Body = {
            "index": index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = None
        return self._chunk(answering) | {"choices": [choice | {"token_ids": None}]}

    def closing(self, answering: Answering) -> Body:
        """Return the streamed usage."""
        return self._chunk(answering) | {
            "choices": [],
            "usage": answering.usage(0, is_stream=True),
            "system_fingerprint": answering.fingerprint,
        }

    def _chunk(self, answering: Answering) -> Body:
        return {
            "id": answering.id,
            "object": "chat.completion.chunk",
            "created": answering.created,
            "model": answering.model,
        }

    def _choice(self, answering: Answering) -> Body:
        message = {
            "role": "assistant",
            "content": answering.text(0),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }


COMPLETION = CompletionFormat()
CHAT = ChatFormat()


def generated_ids(answering: Answering) -> Body:
    """Return the body of ``/inference/v1/generate``."""
    job = answering.jobs[0]
    version = {"version": "default", "start": 0, "end": job.produced}
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": job.reply_tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [version],
        "logprobs": None,
    }
    return {
        "request_id": answering.id,
        "model": answering.model,
        "created": answering.created,
        "usage": answering.usage(None),
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": answering.kv_transfer_params,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [choice],
    }


def rendered(*, request_id: str, token_ids: list[int], model: str, asked: Body) -> Body:
    """Return one rendered prompt; ``asked`` holds sampling values that differ from the default."""
    sampling: Body = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": [],
        "stop_token_ids": [],
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    return {
        "request_id": request_id,
        "token_ids": token_ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling | asked.pop("sampling"),
        "model": model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": False,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    } | asked


def models(config: EngineDoubleConfig, adapters: Iterable[str], *, created: int) -> Body:
    """Return ``/v1/models``: the base model, then its adapters."""
    names = [(config.model, None), *((lora, config.model) for lora in adapters)]
    data = []
    for name, parent in names:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        data.append(
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": name if parent else f"/models/{name}",
                "parent": parent,
                "max_model_len": None if parent else config.context_tokens,
                "permission": [permission],
            }
        )
    return {"object": "list", "data": data}


def event_sources(config: EngineDoubleConfig, ranks: list[Rank]) -> Body:
    """Return ``/kv_event_sources``: the endpoints of each rank as vLLM was told to bind them.

    vLLM binds where the host is ``*``, so that is what a client sees and has to replace; the
    double itself listens on one address only.
    """
    sources = {}
    for rank in ranks:
        if rank.publisher is not None:
            sources[str(rank.index)] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": _any_host(rank.publisher.endpoint),
                "replay_endpoint": _any_host(rank.publisher.replay_endpoint),
                "buffer_steps": config.buffer_steps,
                "hwm": SEND_LIMIT_MESSAGES,
                "max_queue_size": SEND_LIMIT_MESSAGES,
                "topic": config.topic,
            }
    return sources


def transfer_params(
    asked: Body | None, *, config: EngineDoubleConfig, rank: Rank, job: Job, engine_id: str
) -> Body | None:
    """Return what a prefill engine tells the decode engine, keeping keys it does not know."""
    if not asked or not asked.get("do_remote_decode"):
        return None
    kept = {key: value for key, value in asked.items() if key not in _ENGINE_KEYS}
    return kept | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{engine_id}_dp{rank.index}",
        "remote_block_ids": [list(job.table.block_ids)],
        "remote_request_id": f"req-{job.prompt.seed:016x}",
        "remote_host": config.remote_host,
        "remote_port": _REMOTE_PORT + rank.index,
        "tp_size": 1,
        "remote_num_tokens": len(job.prompt.tokens),
        **msgspec.json.decode(config.transfer_keys),
    }


def error_body(error: ApiError) -> Body:
    """Return vLLM's error envelope."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.status,
        }
    }


def _any_host(endpoint: str) -> str:
    return "tcp://*:" + endpoint.rpartition(":")[2]
