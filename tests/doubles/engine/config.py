"""What one engine double looks like from outside, fixed for its lifetime."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

_CAPTURED = Path(__file__).resolve().parents[2] / "data" / "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDoubleConfig:
    """Settings of an engine double; the defaults answer at once, like an idle engine.

    One block of each rank is vLLM's null block, so ``num_blocks`` leaves ``num_blocks - 1``
    usable. ``max_model_len`` of None means as much as the cache holds, at most 8192 tokens.
    A fixed port that is still taken is tried for ``bind_seconds``. ``missing_metrics`` names
    families (``vllm:kv_cache_usage_perc``) to leave out of /metrics. ``transfer_keys`` is a
    JSON object of further keys for the transfer parameters of a prefill leg. ``other_apis`` are
    ``/v1/responses`` and ``/v1/messages``, which older engines lack or do not render.

    Raises:
        ValueError: when a size is not positive, one longest request cannot fit the cache, or
            ``transfer_keys`` is no JSON object.
    """

    model: str = "tiny"
    loras: tuple[str, ...] = ()
    version: str = "0.32.0"
    host: str = "127.0.0.1"
    port: int = 0
    block_size: int = 32
    num_blocks: int = 1024
    cpu_blocks: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    dp_size: int = 1
    response_tokens: int = 16
    prompt_tokens_details: bool = True
    scale_out: bool = True
    store_responses: bool = False
    other_apis: bool = True
    render_other_apis: bool = True
    embedding_size: int = 8
    tokenizer_path: Path = _CAPTURED / "tokenizer.json"
    chat_template_path: Path = _CAPTURED / "chat_template.jinja"
    bos_token: str = "<s>"  # noqa: S105 - a text token, no secret
    eos_token: str = "</s>"  # noqa: S105 - a text token, no secret

    publish_events: bool = True
    offer_kv_event_sources: bool = True
    topic: str = ""
    event_encoding: Literal["map", "array"] = "map"
    block_hash_form: Literal["int", "bytes"] = "int"
    replay_framing: Literal["topic", "plain"] = "topic"
    buffer_steps: int = 10_000
    missing_metrics: frozenset[str] = frozenset()

    prefill_tokens_per_second: float = 0.0
    decode_seconds_per_token: float = 0.0
    overhead_seconds: float = 0.0
    queue_seconds: float = 60.0

    bind_seconds: float = 5.0
    requests_kept: int = 200
    max_body_bytes: int = 64 * 1024 * 1024
    remote_host: str = "127.0.0.1"
    transfer_keys: str = "{}"
    kv_cache_memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.block_size, self.num_blocks - 1, self.dp_size, self.buffer_steps) < 1:
            raise ValueError("block_size, num_blocks - 1, dp_size and buffer_steps must be >= 1")
        try:
            msgspec.json.decode(self.transfer_keys, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"transfer_keys must be a JSON object: {error}") from error
        if self.max_model_len is not None and self.max_model_len > self._capacity_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the {self._capacity_tokens} tokens"
                " the KV cache holds"
            )

    @property
    def _capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.max_model_len or min(8192, self._capacity_tokens)
