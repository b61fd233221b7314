"""Clients that know every answer beforehand, and judge what they get."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.benchmarks.chaos.parts import Part

_ANSWER_SECONDS = 60.0
_THINK_SECONDS = (0.0, 0.1)
_WORDS = "winter pass village bridge lamp window snow river mill road".split()  # noqa: SIM905 (shorter)
_SYSTEMS, _PROMPTS = 6, 60
_HURT_SECONDS = 1.0
"""How long after a trouble its consequences may still show."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the one right answer."""

    body: dict[str, Any]
    answer: str


@dataclass(slots=True)
class Verdicts:
    """What became of all requests, by kind; ``details`` are the first few that are wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, kind: str, detail: str = "") -> None:
        """Count one; ``detail`` says what was wrong about it."""
        self.counts[kind] += 1
        if detail and len(self.details) < 20:
            self.details.append(f"{kind}: {detail[:400]}")


def _text(seed: int, words: int) -> str:
    source = random.Random(seed)
    return " ".join(source.choice(_WORDS) for _ in range(words))


async def prepare_questions(engine_url: str) -> list[Question]:
    """Ask an engine that is well for the right answers."""
    questions = []
    async with aiohttp.ClientSession() as session:
        for number in range(_PROMPTS):
            prompt = f"{_text(number % _SYSTEMS, 200)} {_text(1000 + number, 40)} {number}"
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8 + number % 16}
            async with session.post(f"{engine_url}/v1/completions", json=body) as response:
                answer = (await response.json())["choices"][0]["text"]
            questions.append(Question(body, answer))
    assert len({q.answer for q in questions}) > _PROMPTS // 2, "answers depend on the prompt"
    return questions


class Clients:
    """Some clients at once, each with one request after the other."""

    def __init__(
        self,
        questions: Sequence[Question],
        replicas: Sequence[Part],
        engines: Mapping[str, Part],
        seed: int,
    ) -> None:
        self._questions = questions
        self._replicas = replicas
        self._engines = engines
        self._random = random.Random(seed)
        self.verdicts = Verdicts()
        self.stopping = asyncio.Event()

    async def run(self, count: int) -> None:
        """Ask until told to stop."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(count)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = number
        while not self.stopping.is_set():
            turn += 1
            question = self._random.choice(self._questions)
            streams = self._random.random() < 0.5
            await self._ask(session, question, turn, streams=streams)
            await asyncio.sleep(self._random.uniform(*_THINK_SECONDS))

    async def _ask(
        self, session: aiohttp.ClientSession, question: Question, turn: int, *, streams: bool
    ) -> None:
        """Ask one replica, or the other where that one is lost before it answered."""
        for attempt in range(len(self._replicas) * 20):
            replica = self._replicas[(turn + attempt) % len(self._replicas)]
            if await self._ask_replica(session, question, replica, streams=streams):
                return
            await asyncio.sleep(0.1)
        self.verdicts.add("no_replica", "none of the replicas answered")

    async def _ask_replica(
        self, session: aiohttp.ClientSession, question: Question, replica: Part, *, streams: bool
    ) -> bool:
        """Ask; returns whether the client has its answer, be it a bad one."""
        began_at = time.monotonic()
        given = _Given()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                body = question.body | {"stream": streams}
                async with session.post(f"{replica.url}/v1/completions", json=body) as response:
                    given.status = response.status
                    given.engine = response.headers.get("x-nearkv-engine", "")
                    async for piece in response.content.iter_any():
                        given.body += piece
            given.is_whole = True
        except TimeoutError:
            self.verdicts.add("hung", f"{replica.name}, engine {given.engine or 'unknown'}")
            return True
        except (aiohttp.ClientError, OSError) as error:
            if not self._is_hurt(replica, given.engine, began_at):
                self.verdicts.add("unexplained", f"{replica.name} {given.engine}: {error!r}")
            if not given.status:
                self.verdicts.counts["replica_lost"] += 1
                return False
        self.verdicts.seconds.append(time.monotonic() - began_at)
        self._judge(question, given, replica, streams=streams, began_at=began_at)
        return True

    def _judge(
        self,
        question: Question,
        given: "_Given",
        replica: Part,
        *,
        streams: bool,
        began_at: float,
    ) -> None:
        told = given.body.decode(errors="replace")
        if given.status != 200:
            self.verdicts.add(f"status_{given.status}", f"{given.engine}: {told}")
            return
        text, ended = _streamed(told) if streams else _whole(told)
        if ended and text == question.answer:
            self.verdicts.add("right")
        elif ended or not question.answer.startswith(text):
            self.verdicts.add("wrong", f"{given.engine}: {text!r} for {question.answer!r}")
        else:
            self.verdicts.add("broken")
            if not self._is_hurt(replica, given.engine, began_at):
                self.verdicts.add("unexplained", f"stream of {given.engine} broke: {told[-300:]}")

    def _is_hurt(self, replica: Part, engine: str, began_at: float) -> bool:
        """Tell whether a trouble of the replica asked, or of the engine, explains what happened."""
        parts = [replica, *([self._engines[engine]] if engine in self._engines else [])]
        return any(part.hurt_at >= began_at - _HURT_SECONDS for part in parts)


@dataclass(slots=True)
class _Given:
    """An answer as far as it came."""

    status: int = 0
    engine: str = ""
    body: bytes = b""
    is_whole: bool = False


def _whole(told: str) -> tuple[str, bool]:
    try:
        return json.loads(told)["choices"][0]["text"], True
    except (ValueError, LookupError):
        return "", False


def _streamed(told: str) -> tuple[str, bool]:
    """Return the text of a stream's whole events, and whether it came to its end."""
    text, ended = "", False
    *events, _ = told.split("\n\n")
    for event in events:
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            ended = True
            break
        if not data.strip():
            continue  # the blank line that ends whatever an engine left unfinished
        try:
            said = json.loads(data)
        except ValueError:
            break  # such an unfinished event
        if "error" in said:
            break
        text += "".join(choice["text"] for choice in said["choices"])
    return text, ended
