"""Conversations that share system prompts: who says what when, and playing them to a router.

The workload of ``shared/reference/peers_measured.md`` 2.3: 200 conversations of 8 turns, 20
system prompts of 1,024 tokens (Zipf), 8 conversations a second. A user thinks for 1.25 s on
average: with that, round robin and hashing by session come out as in the run described there.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

_ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = _ROOT / "tests" / "data" / "vllm" / "tokenizer.json"
"""The tokenizer of the engine doubles."""
_DEADLINE_SECONDS = 60.0
_ANSWER_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of a workload; times in seconds, texts in tokens."""

    conversations: int = 200
    turns: int = 8
    system_prompts: int = 20
    system_tokens: int = 1024
    turn_tokens: tuple[int, int] = (90, 280)
    arrivals_per_second: float = 8.0
    thinking_seconds: float = 1.25


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user's prompts, each the one before and more, and the pauses between them."""

    name: str
    starts_at: float
    prompts: Sequence[str]
    pauses: Sequence[float]


@dataclass(slots=True)
class Played:
    """What came of a workload: seconds to each first token, and tokens."""

    first_tokens: list[float] = field(default_factory=list)
    first_token_of: dict[str, float] = field(default_factory=dict)
    """The same by request id."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    engines: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        """The share of prompt tokens that engines had cached, by their own word."""
        return self.cached_tokens / max(1, self.prompt_tokens)


class Writer:
    """Writes texts of a given number of tokens that stay the same tokens within longer texts."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        words = sorted(set((_ROOT / "LICENSE").read_text().split()))
        self._sizes = {
            word: len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) for word in words
        }
        self._words = words
        self._short = [word for word, size in self._sizes.items() if size == 1]

    def text(self, tokens: int) -> str:
        """Return a text of exactly so many tokens, each word with its space before it."""
        parts: list[str] = []
        while tokens > 0:
            word = self._chance.choice(self._words)
            if self._sizes[word] > tokens:
                word = self._chance.choice(self._short)
            parts.append(f" {word}")
            tokens -= self._sizes[word]
        return "".join(parts)


def conversations(workload: Workload, *, seed: int) -> list[Conversation]:
    """Return a workload's conversations, the same for the same seed."""
    chance = random.Random(seed)
    writer = Writer(chance)
    systems = [writer.text(workload.system_tokens - 1) for _ in range(workload.system_prompts)]
    popularity = [1 / (rank + 1) for rank in range(len(systems))]
    found, starts_at = [], 0.0
    for number in range(workload.conversations):
        starts_at += chance.expovariate(workload.arrivals_per_second)
        (system,) = chance.choices(systems, popularity)
        said = [writer.text(chance.randint(*workload.turn_tokens)) for _ in range(workload.turns)]
        prompts = list(accumulate(said, initial=system))[1:]
        pauses = [chance.expovariate(1 / workload.thinking_seconds) for _ in prompts]
        found.append(Conversation(f"{seed}-{number}", starts_at, prompts, pauses))
    return found


async def play(url: str, workload: Sequence[Conversation], *, model: str) -> Played:
    """Play conversations to a router, each turn after the answer to the one before."""
    played = Played()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        began = time.perf_counter()

        async def converse(conversation: Conversation) -> None:
            await asyncio.sleep(began + conversation.starts_at - time.perf_counter())
            turns = zip(conversation.prompts, conversation.pauses, strict=True)
            for number, (prompt, pause) in enumerate(turns):
                headers = {
                    "X-Session-ID": conversation.name,
                    "X-Request-Id": f"{conversation.name}-{number}",
                }
                try:
                    await _ask(session, url, headers, prompt, model, played)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    played.failed.append(repr(error))
                await asyncio.sleep(pause)

        await asyncio.gather(*map(converse, workload))
    return played


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    prompt: str,
    model: str,
    played: Played,
) -> None:
    """Send one turn and count what came of it; raises ``ValueError`` for a broken answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": _ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_at, usage = 0.0, None
    sent_at = time.perf_counter()
    async with (
        asyncio.timeout(_DEADLINE_SECONDS),
        session.post(f"{url}/v1/completions", json=body, headers=headers) as answer,
    ):
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            first_at = first_at or time.perf_counter()
            usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage
    if usage is None:
        raise ValueError("the answer ended without usage")
    played.first_tokens.append(first_at - sent_at)
    played.first_token_of[headers["X-Request-Id"]] = first_at - sent_at
    played.prompt_tokens += usage["prompt_tokens"]
    played.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    engine = answer.headers.get("x-nearkv-engine", "")
    played.engines[engine] = played.engines.get(engine, 0) + 1
