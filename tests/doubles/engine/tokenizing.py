"""Text to tokens and tokens to made-up text, each prompt tokenized once and remembered."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tests.doubles.engine.block_cache import chain_hashes
from tests.doubles.engine.config import EngineDoubleConfig

_MEMO_BYTES = 64 * 1024 * 1024
_KEY_OVERHEAD_BYTES = 512
# How byte-level and SentencePiece vocabularies write a leading space.
_SPACES = ("Ġ", "▁")


@dataclass(slots=True)
class Prompt:
    """Token ids of one prompt, with what is derived from them computed once."""

    tokens: list[int]
    _seed: int | None = field(default=None, repr=False)
    _hashes: list[int] | None = field(default=None, repr=False)

    @property
    def seed(self) -> int:
        """A number that depends on the tokens only."""
        if self._seed is None:
            self._seed = xxhash.xxh3_64_intdigest(array("I", self.tokens).tobytes())
        return self._seed

    def hashes(self, block_size: int) -> list[int]:
        """Hashes of the full blocks outside any salt or adapter, for one fixed block size."""
        if self._hashes is None:
            self._hashes = chain_hashes(self.tokens, block_size=block_size)
        return self._hashes


class PromptMemo:
    """Prompts by text, least recently used out first, bounded by bytes of text."""

    def __init__(self, limit_bytes: int = _MEMO_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._prompts: OrderedDict[object, tuple[Prompt, int]] = OrderedDict()

    def get(self, key: object, text: str | bytes, make: Callable[[], Prompt]) -> Prompt:
        """Return the prompt for ``key``, made once; ``text`` is what its size is counted by."""
        found = self._prompts.get(key)
        if found is not None:
            self._prompts.move_to_end(key)
            return found[0]
        prompt = make()
        size = len(text) + _KEY_OVERHEAD_BYTES
        self._prompts[key] = (prompt, size)
        self._used_bytes += size
        while self._used_bytes > self._limit_bytes and len(self._prompts) > 1:
            self._used_bytes -= self._prompts.popitem(last=False)[1][1]
        return prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """Generated tokens and the text of each."""

    token_ids: list[int]
    pieces: list[str]


class PromptTokenizer:
    """The tokenizer and chat template of the model the double stands for."""

    def __init__(self, config: EngineDoubleConfig) -> None:
        self._tokenizer = Tokenizer.from_file(str(config.tokenizer_path))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(_read_template(config.chat_template_path))
        self._marks = {"bos_token": config.bos_token, "eos_token": config.eos_token}
        self._memo = PromptMemo()

    @cached_property
    def longest_token_chars(self) -> int:
        """Length of the longest vocabulary entry, in characters."""
        return max(len(token) for token in self._tokenizer.get_vocab())

    def text(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Tokenize plain text."""
        return self._memo.get(
            (text, add_special_tokens),
            text,
            lambda: Prompt(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids),
        )

    def chat(self, messages: bytes, options: "ChatOptions") -> Prompt:
        """Render and tokenize a conversation given as its JSON bytes.

        Raises:
            ValueError: when ``messages`` is not a list of messages with a role, or the template
                refuses them.
        """
        key = (messages, options.add_generation_prompt, options.add_special_tokens, options.extra)
        return self._memo.get(key, messages, lambda: self._render(messages, options))

    def token_strings(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the vocabulary entries of ``tokens``, as vLLM's ``token_strs``."""
        return [self._tokenizer.id_to_token(token) for token in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        return str(self._tokenizer.decode(list(tokens)))

    def reply(self, prompt: Prompt, count: int) -> Reply:
        """Make up ``count`` tokens, the same for the same prompt.

        Only words that tokenize back to the same single token are used, so a conversation that
        repeats the answer continues on the same blocks.
        """
        words = self._stable_words
        first, stride = prompt.seed, 1 + 2 * (prompt.seed % 997)
        chosen = [words[(first + stride * index) % len(words)] for index in range(count)]
        return Reply([token for token, _ in chosen], [word for _, word in chosen])

    def _render(self, messages: bytes, options: "ChatOptions") -> Prompt:
        plain = _flatten(msgspec.json.decode(messages))
        text = self._template.render(
            messages=plain,
            add_generation_prompt=options.add_generation_prompt,
            **self._marks,
            **(msgspec.json.decode(options.extra) if options.extra else {}),
        )
        encoded = self._tokenizer.encode(text, add_special_tokens=options.add_special_tokens)
        return Prompt(encoded.ids)

    @cached_property
    def _stable_words(self) -> list[tuple[int, str]]:
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        words = [(i, " " + t[1:]) for t, i in vocabulary if t[:1] in _SPACES and _is_word(t[1:])]
        encoded = self._tokenizer.encode_batch([w for _, w in words], add_special_tokens=False)
        stable = [word for word, code in zip(words, encoded, strict=True) if code.ids == [word[0]]]
        return stable or [(i, self._tokenizer.decode([i])) for _, i in vocabulary]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered; ``extra`` is the JSON of tools and template arguments."""

    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    extra: bytes = b""


def _read_template(path: Path) -> str:
    """Return a chat template from its own file or from a ``tokenizer_config.json``."""
    if path.suffix != ".json":
        return path.read_text()
    return str(msgspec.json.decode(path.read_bytes())["chat_template"])


def _is_word(text: str) -> bool:
    return len(text) > 1 and text.isascii() and text.isalpha()


def _flatten(messages: Any) -> list[dict[str, Any]]:
    """Join text parts by newlines, as vLLM does for templates that expect plain strings."""
    if not isinstance(messages, list):
        raise ValueError("messages must be a list")  # noqa: TRY004 - one error type for callers
    plain = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("each message must be an object with a role")  # noqa: TRY004 - as above
        content = message.get("content")
        if isinstance(content, list):
            parts = [str(part.get("text", "")) for part in content if isinstance(part, dict)]
            content = "\n".join(parts)
        plain.append({**message, "content": content or ""})
    return plain
