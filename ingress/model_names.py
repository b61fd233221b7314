"""Names of models: what engines serve, aliases of it, and what nobody serves (pure).

An alias stands for a name that engines serve; a request under it is forwarded under that
name, and nothing else of it changes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from nearkv.ingress.errors import RequestError, UnknownModelError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.requests import GenerateRequest

_MOST_NAMED = 50
_MOST_CHARACTERS = 200
_LONGEST_NAME = 1024
"""Where an engine may serve any model, names are kept in budgets, lines and records."""
_OWNER = "nearkv"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ModelNames:
    """The configured aliases."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = dict(aliases)

    def apply(self, parsed: GenerateRequest, body: bytes) -> tuple[GenerateRequest, bytes]:
        """Return a request under the name that engines know; most pass as they are.

        Raises :class:`UnknownModelError` for what is too long to be a name.
        """
        model = parsed.model or ""
        if len(model) > _LONGEST_NAME:
            raise UnknownModelError(
                f"The model `{model[:_MOST_CHARACTERS]}`... does not exist.", param="model"
            )
        name = self.aliases.get(model)
        if name is None:
            return parsed, body
        return msgspec.structs.replace(parsed, model=name), rename_model(body, name)

    def unknown(self, model: str, engines: Iterable[EngineView]) -> UnknownModelError:
        """Return the error for a name that nobody serves; it says what is served."""
        known = [card["id"] for card in list_models(engines, self.aliases)]
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        named = ", ".join(known[:_MOST_NAMED])
        return UnknownModelError(
            f"The model `{model[:_MOST_CHARACTERS]}` does not exist. Known: {named}{more}.",
            param="model",
        )


def rename_model(body: bytes, name: str) -> bytes:
    """Return a JSON body under another model; the other values keep their bytes.

    Raises :class:`RequestError` for a body that is no JSON object.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(fields)


def list_models(engines: Iterable[EngineView], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a card for each model, adapter and alias that can be asked for, by name.

    ``max_model_len`` is what every engine that tells can take; ``root`` of an alias is what
    it stands for, ``parent`` of an adapter the model it belongs to.
    """
    cards: dict[str, dict[str, Any]] = {}
    for view in engines:
        info = view.info
        for name in info.models:
            _note(cards, name, info.max_model_len)
        for name in info.adapters:
            _note(cards, name, info.max_model_len, parent=info.model)
    for name, target in aliases.items():
        if target in cards:
            cards[name] = {**cards[target], "id": name, "root": target}
    return [card for _, card in sorted(cards.items())]


def _note(
    cards: dict[str, dict[str, Any]], name: str, length: int | None, parent: str | None = None
) -> None:
    card = cards.get(name)
    if card is None:
        cards[name] = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": _OWNER,
            "root": name,
            "parent": parent,
            "max_model_len": length,
        }
    elif length is not None:
        known = card["max_model_len"]
        card["max_model_len"] = length if known is None else min(known, length)
