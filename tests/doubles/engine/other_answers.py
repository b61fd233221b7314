"""Bodies and events of ``/v1/responses`` and ``/v1/messages``, shaped like vLLM 0.32's; pure."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.doubles.engine.answers import Answering, Body
from tests.doubles.engine.ranks import Job

Event = tuple[str, Body]


def written_tokens(job: Job, block_size: int) -> int:
    """Return the prompt tokens that were computed into full blocks."""
    return max(0, len(job.prompt.tokens) // block_size * block_size - job.cached_tokens)


class ResponsesFormat:
    """``/v1/responses``; cached tokens are told whatever the engine's settings."""

    def __init__(self, wanted: Any, *, block_size: int) -> None:
        self._wanted = wanted
        self._block_size = block_size
        self._item_id = f"msg_{random.getrandbits(64):016x}"

    def body(self, answering: Answering, status: str) -> Body:
        """Return the response as it stands."""
        wanted, job = self._wanted, answering.jobs[0]
        is_over = status == "incomplete"
        return {
            "id": answering.id,
            "created_at": answering.created,
            "incomplete_details": {"reason": "max_output_tokens"} if is_over else None,
            "instructions": wanted.instructions,
            "metadata": None,
            "model": answering.model,
            "object": "response",
            "output": [self._item(answering, "completed")] if is_over else [],
            "parallel_tool_calls": True,
            "temperature": 1.0 if wanted.temperature is None else float(wanted.temperature),
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": len(job.reply_tokens),
            "max_tool_calls": None,
            "previous_response_id": wanted.previous_response_id,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": self._usage(job) if is_over else None,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def opening(self, answering: Answering) -> Iterator[Event]:
        """Yield what a stream says before any text."""
        for event in ("created", "in_progress"):
            yield f"response.{event}", {"response": self.body(answering, "in_progress")}
        item = {**self._item(answering, "in_progress"), "content": []}
        yield "response.output_item.added", {"item": item, "output_index": 0}
        part = _part("", logprobs=[])
        yield "response.content_part.added", self._place() | {"part": part}

    def piece(self, text: str) -> Event:
        """Return one streamed piece of text."""
        return "response.output_text.delta", self._place() | {"delta": text, "logprobs": []}

    def closing(self, answering: Answering) -> Iterator[Event]:
        """Yield the end of a stream; its last event holds the whole response."""
        text = answering.text(0)
        yield "response.output_text.done", self._place() | {"logprobs": [], "text": text}
        yield "response.content_part.done", self._place() | {"part": _part(text)}
        item = self._item(answering, "completed")
        yield "response.output_item.done", {"item": item, "output_index": 0}
        yield "response.completed", {"response": self.body(answering, "incomplete")}

    @staticmethod
    def event(number: int, event: Event) -> bytes:
        """Return an event as it is sent."""
        name, body = event
        data = msgspec.json.encode(body | {"sequence_number": number, "type": name})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def _place(self) -> Body:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _item(self, answering: Answering, status: str) -> Body:
        return {
            "id": self._item_id,
            "content": [_part(answering.text(0))],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _usage(self, job: Job) -> Body:
        asked = len(job.prompt.tokens)
        return {
            "input_tokens": asked,
            "input_tokens_details": {
                "cached_tokens": job.cached_tokens,
                "cache_write_tokens": written_tokens(job, self._block_size),
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": job.produced,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": asked + job.produced,
        }


class MessagesFormat:
    """``/v1/messages``; the counts at a stream's beginning know nothing of the cache."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size

    def whole(self, answering: Answering) -> Body:
        """Return the body of a plain answer."""
        told: Body = (
            {}
            if answering.kv_transfer_params is None
            else {"kv_transfer_params": answering.kv_transfer_params}
        )
        return {
            "id": answering.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": answering.text(0)}],
            "model": answering.model,
            "stop_reason": "max_tokens",
            "usage": self._usage(answering),
        } | told

    def opening(self, answering: Answering) -> Iterator[Event]:
        """Yield what a stream says before any text."""
        message: Body = {
            "id": answering.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": answering.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(answering.jobs[0].prompt.tokens), "output_tokens": 0},
        }
        yield "message_start", {"message": message}
        block = {"type": "text", "text": ""}
        yield "content_block_start", {"content_block": block, "index": 0}

    def piece(self, text: str) -> Event:
        """Return one streamed piece of text."""
        delta = {"type": "text_delta", "text": text}
        return "content_block_delta", {"delta": delta, "index": 0}

    def closing(self, answering: Answering) -> Iterator[Event]:
        """Yield the end of a stream."""
        yield "content_block_stop", {"index": 0}
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        yield "message_delta", {"delta": delta, "usage": self._usage(answering)}
        yield "message_stop", {}

    @staticmethod
    def event(number: int, event: Event) -> bytes:
        """Return an event as it is sent."""
        del number
        name, body = event
        data = msgspec.json.encode({"type": name} | body)
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def _usage(self, answering: Answering) -> Body:
        job = answering.jobs[0]
        asked = len(job.prompt.tokens)
        if not answering.with_details:
            return {"input_tokens": asked, "output_tokens": job.produced}
        written = written_tokens(job, self._block_size)
        return {
            "input_tokens": asked - job.cached_tokens - written,
            "output_tokens": job.produced,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": job.cached_tokens,
        }


def _part(text: str, *, logprobs: list[Any] | None = None) -> Body:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}
