"""Tokenizing in this process, for engines that offer neither /render nor /tokenize.

Needs the model's ``tokenizer.json`` and, for chat, its template (``chat_template.jinja`` or
the entry in ``tokenizer_config.json``). A template that differs from the engine's would make
predictions wrong without a word; the parity check is there to notice.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nearkv.ingress.errors import IngressError, TokenizationError
from nearkv.ingress.tokens.engine_tokenizer import Tokenized

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Encoding, Tokenizer

_NOT_HONOURED = ("chat_template", "continue_final_message", "documents")
"""Fields that change the rendering in the engine, in ways that are not repeated here."""
_TEMPLATE_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
"""What a template's own expressions raise on messages it was not made for."""


class LocalTokenizer:
    """One model's tokenizer and chat template, loaded from a folder."""

    def __init__(
        self, tokenizer: "Tokenizer", template: "Template | None", special: dict[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special = special

    @classmethod
    def load(cls, folder: Path) -> "LocalTokenizer":
        """Load from a folder; raises :class:`IngressError` naming what is missing."""
        # Loaded only where a local tokenizer is configured.
        from tokenizers import Tokenizer  # noqa: PLC0415

        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise IngressError(f"tokenization.local: cannot load {path}: {error}") from error
        config = _read_config(folder / "tokenizer_config.json")
        special = {
            name: token["content"] if isinstance(token, dict) else str(token)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := config.get(name))
        }
        return cls(tokenizer, _load_template(folder, config), special)

    def tokenize_text(self, text: str) -> Tokenized:
        """Tokenize a completion prompt, special tokens included."""
        encoded = self._encode(text)
        return Tokenized(encoded.ids, encoded.tokens)

    def tokenize_tail(self, text: str) -> Tokenized:
        """Tokenize the rest of a text, without special tokens in front."""
        encoded = self._encode(text, add_special_tokens=False)
        return Tokenized(encoded.ids, encoded.tokens)

    def tokenize_chat(self, body: dict[str, Any]) -> Tokenized:
        """Render and tokenize a chat; raises :class:`TokenizationError`."""
        if self._template is None:
            raise TokenizationError("no chat template is configured for this model")
        from jinja2 import TemplateError  # noqa: PLC0415 (see load)

        given = [field for field in _NOT_HONOURED if body.get(field)]
        kwargs = body.get("chat_template_kwargs") or {}
        if given or not isinstance(kwargs, dict):
            raise TokenizationError(
                f"cannot render locally with {', '.join(given) or 'these chat_template_kwargs'}"
            )
        variables = {
            "add_generation_prompt": body.get("add_generation_prompt", True),
            "tools": body.get("tools"),
            **self._special,
            **kwargs,
            "messages": body["messages"],
        }
        try:
            text = self._template.render(variables)
        except (TemplateError, *_TEMPLATE_FAILURES) as error:
            raise TokenizationError(f"the chat template failed: {error}") from error
        return Tokenized(self._encode(text, add_special_tokens=False).ids)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> "Encoding":
        """Encode one text; only batches let other threads run meanwhile."""
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise IngressError(f"tokenization.local: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise IngressError(f"tokenization.local: {path} does not hold an object")
    return config


def _load_template(folder: Path, config: dict[str, Any]) -> "Template | None":
    from jinja2 import TemplateError  # noqa: PLC0415 (see load)
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 (see load)

    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter sorts keys and escapes for HTML; chat templates expect plain JSON.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise IngressError(f"tokenization.local: chat template of {folder}: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    """Serve the templates' ``raise_exception``, with which they refuse messages."""
    raise ValueError(message)
