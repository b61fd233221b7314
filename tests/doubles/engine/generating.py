"""From a decoded request to served tokens: checks, prompts, ranks, jobs."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.doubles.engine.answers import Answering, transfer_params
from tests.doubles.engine.block_cache import SHARED, CacheScope
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.ranks import Job, Rank
from tests.doubles.engine.requests import ApiError, GenerationRequest
from tests.doubles.engine.tokenizing import Prompt, PromptTokenizer

_RANK_HEADER = "X-data-parallel-rank"


class Generator:
    """Serves prompts on the ranks of one engine."""

    def __init__(
        self,
        config: EngineDoubleConfig,
        *,
        tokenizer: PromptTokenizer,
        ranks: Sequence[Rank],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._next_rank = 0
        self._engine_id = str(uuid.uuid4())
        self._lora_ids = {name: index for index, name in enumerate(config.loras, start=1)}
        self._next_lora_id = len(config.loras) + 1
        self._fingerprint = f"vllm-{config.version}-{self._engine_id[:8]}"

    def scope(self, wanted: GenerationRequest) -> CacheScope:
        """Return what limits the sharing of the request's blocks.

        Raises:
            ApiError: 404 for a model that is not served.
        """
        lora = self.adapter(wanted.model)
        if lora is None and not wanted.cache_salt:
            return SHARED
        return CacheScope(wanted.cache_salt, lora, self._lora_ids.get(lora or ""))

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter ``model`` names, None for the base model.

        Raises:
            ApiError: 404 for a model that is not served.
        """
        if model is None or model == self._config.model:
            return None
        if model in self._lora_ids:
            return model
        known = ", ".join([self._config.model, *self._lora_ids])
        message = f"The model `{model}` does not exist. Valid aliases: {known}."
        raise ApiError(404, message, "NotFoundError", param="model")

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters loaded now."""
        return tuple(self._lora_ids)

    def load_adapter(self, name: str) -> None:
        """Have an adapter from now on."""
        self._lora_ids[name] = self._next_lora_id
        self._next_lora_id += 1

    def unload_adapter(self, name: str) -> bool:
        """Have it no longer; False where there was none."""
        return self._lora_ids.pop(name, None) is not None

    def prompts(
        self, prompt: str | list[int | str | list[int]], *, add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Return the prompts of a completions-like request: text, token ids, or a list of either.

        Raises:
            ApiError: 400 for an empty, mixed or overlong prompt.
        """
        if isinstance(prompt, str):
            return [self._text(prompt, add_special_tokens=add_special_tokens)]
        if prompt and all(isinstance(item, int) for item in prompt):
            return [Prompt([item for item in prompt if isinstance(item, int)])]
        found = []
        for item in prompt:
            if isinstance(item, str):
                found.append(self._text(item, add_special_tokens=add_special_tokens))
            elif isinstance(item, list) and item:
                found.append(Prompt(item))
            else:
                raise _bad_request("prompt must not be empty or mixed", "prompt")
        if not found:
            raise _bad_request("prompt must not be empty", "prompt")
        return found

    def pick_rank(self, headers: Mapping[str, str]) -> Rank:
        """Return the rank a header names, else the next in turn.

        Raises:
            ApiError: 400 for a rank that does not exist.
        """
        asked = headers.get(_RANK_HEADER)
        if asked is None:
            rank = self._ranks[self._next_rank]
            self._next_rank = (self._next_rank + 1) % len(self._ranks)
            return rank
        if not asked.isdecimal() or int(asked) >= len(self._ranks):
            raise _bad_request(f"data parallel rank {asked} is out of range", _RANK_HEADER)
        return self._ranks[int(asked)]

    def reply_tokens(self, prompt: Prompt, asked: int | None) -> int:
        """Return how many tokens to produce for ``prompt``.

        Raises:
            ApiError: 400 when there is no room for them in the context.
        """
        limit, length = self._config.context_tokens, len(prompt.tokens)
        if length == 0:
            raise _bad_request("The prompt cannot be empty", "prompt")
        if asked is not None and asked < 1:
            raise _bad_request(
                f"max_tokens must be at least 1, got {asked}."
                f" (parameter=max_tokens, value={asked})",
                "max_tokens",
            )
        wanted = 1 if asked is None else asked
        if length + wanted > limit:
            raise _bad_request(
                f"This model's maximum context length is {limit} tokens. However, you requested"
                f" {wanted} output tokens and your prompt contains at least {length} input tokens,"
                f" for a total of at least {length + wanted} tokens. Please reduce the length of"
                " the input prompt or the number of requested output tokens."
                f" (parameter=input_tokens, value={length})",
                "input_tokens",
            )
        return min(self._config.response_tokens, limit - length) if asked is None else asked

    @contextmanager
    def answering(
        self,
        wanted: GenerationRequest,
        *,
        rank: Rank,
        prompts: Sequence[Prompt],
        scope: CacheScope,
        max_tokens: int | None,
        request_id: str,
    ) -> Iterator[Answering]:
        """Queue the prompts and give everything back at the end, however it ends.

        Raises:
            ApiError: 400 when a prompt does not fit.
        """
        counts = [self.reply_tokens(prompt, max_tokens) for prompt in prompts]
        jobs, pieces = [], []
        for prompt, count in zip(prompts, counts, strict=True):
            reply = self._tokenizer.reply(prompt, count)
            job = rank.submit(prompt, reply_tokens=reply.token_ids, scope=scope)
            jobs.append(_with_options(job, wanted))
            pieces.append(reply.pieces)
        try:
            yield Answering(
                id=request_id,
                created=int(time.time()),
                model=wanted.model or self._config.model,
                fingerprint=self._fingerprint,
                jobs=jobs,
                pieces=pieces,
                with_details=self._config.prompt_tokens_details,
            )
        finally:
            for job in jobs:
                rank.finish(job)

    async def serve(self, answering: Answering, wanted: GenerationRequest, *, rank: Rank) -> None:
        """Produce all tokens of all prompts, one prompt after the other."""
        for job in answering.jobs:
            await rank.prefill(job)
            await rank.decode(job, len(job.reply_tokens) - 1)
            self.complete(answering, wanted, rank=rank, job=job)

    def complete(
        self, answering: Answering, wanted: GenerationRequest, *, rank: Rank, job: Job
    ) -> None:
        """Finish a job that produced everything, noting where its KV can be fetched from."""
        answering.kv_transfer_params = transfer_params(
            wanted.kv_transfer_params,
            config=self._config,
            rank=rank,
            job=job,
            engine_id=self._engine_id,
        )
        rank.finish(job, "length")

    def _text(self, text: str, *, add_special_tokens: bool) -> Prompt:
        limit = self._config.context_tokens
        if len(text) > limit:
            # Text is never longer than its tokens times the longest token, so most of what is too
            # long is refused without tokenizing it.
            longest = limit * self._tokenizer.longest_token_chars
            if len(text) > longest:
                raise _bad_request(
                    f"This model's maximum context length is {limit} tokens. However, your prompt"
                    f" contains {len(text)} characters (more than {longest} characters, which is"
                    f" the upper bound for {limit} input tokens). Please reduce the length of the"
                    f" input prompt. (parameter=input_text, value={len(text)})",
                    "input_text",
                )
        return self._tokenizer.text(text, add_special_tokens=add_special_tokens)


def _with_options(job: Job, wanted: GenerationRequest) -> Job:
    if wanted.kv_transfer_params:
        job.remote_prefill = bool(wanted.kv_transfer_params.get("do_remote_prefill"))
    if wanted.vllm_xargs:
        job.report_full = wanted.vllm_xargs.get("kv_cache_report_mode") == "full"
    return job


def _bad_request(message: str, param: str) -> ApiError:
    return ApiError(400, message, "BadRequestError", param=param)
