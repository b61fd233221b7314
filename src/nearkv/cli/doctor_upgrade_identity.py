"""Two engines as such: version, models, limits, endpoints, tokens (pure)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nearkv.cli.doctor_upgrade_model import (
    Card,
    EngineFacts,
    Finding,
    Severity,
    Tokens,
    count_words,
    same_or,
    unknown,
)
from nearkv.cli.doctor_upgrade_samples import (
    EVENT_SOURCES,
    RENDER_CHAT,
    RENDER_TEXT,
    SLEEP,
    TOKENIZE,
)

TESTED_VERSIONS = ("0.32.0",)
"""Versions of vLLM that nearkv's own tests run on; for others see docs/upgrades.md."""

_NOT_THERE = frozenset({404, 405, 501})
_WRONG_METHOD = 405
_DECLINED = 403
_THERE = "there"
_NO_ANSWER = "no answer"
_SIDE_BY_SIDE = "keep the versions apart: another namespace with an ingress of its own"


@dataclass(frozen=True, slots=True)
class _Loss:
    """What becomes of it when an endpoint is gone."""

    severity: Severity
    effect: str
    advice: str = ""


_UNUSED = "nearkv does not use it"
_LOSSES: Mapping[str, _Loss] = MappingProxyType(
    {
        RENDER_TEXT: _Loss(
            Severity.DEGRADES,
            "prompts are tokenized by /tokenize instead",
            "start the engine with --enable-scale-out",
        ),
        RENDER_CHAT: _Loss(
            Severity.DEGRADES,
            "chats are tokenized by /tokenize instead, which may see other defaults",
            "start the engine with --enable-scale-out",
        ),
        "/v1/responses/render": _Loss(
            Severity.DEGRADES, "keys of /v1/responses are a guess: they are tokenized as chats"
        ),
        "/v1/messages/render": _Loss(
            Severity.DEGRADES, "keys of /v1/messages are a guess: they are tokenized as chats"
        ),
        TOKENIZE: _Loss(
            Severity.DEGRADES, "long texts are tokenized as a whole, not by their tail"
        ),
        EVENT_SOURCES: _Loss(
            Severity.BREAKS,
            "the agent does not find the engine's KV events",
            "set kv_events and kv_replay of the engine in the agent's settings",
        ),
        "/version": _Loss(Severity.DEGRADES, "the engine's version is unknown in nearkv status"),
        "/load": _Loss(Severity.DIFFERS, _UNUSED),
        SLEEP: _Loss(Severity.DIFFERS, "nearkv only reads the sleep state from /metrics"),
    }
)


def compare_identity(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare version, models and the longest request."""
    yield _version(old, new)
    yield _model(old, new)
    yield _adapters(old, new)
    yield _longest(old, new)


def compare_endpoints(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare which endpoints are there."""
    for path, loss in _LOSSES.items():
        before, after = (_presence(path, facts.endpoints.get(path)) for facts in (old, new))
        texts = {"old": before, "new": after}
        check = f"endpoint {path}"
        if _NO_ANSWER in (before, after):
            yield unknown(check, "no answer came", **texts)
        elif (before == _THERE) == (after == _THERE):
            yield Finding(check=check, severity=Severity.SAME, **texts)
        elif after == _THERE:
            yield Finding(check=check, severity=Severity.DIFFERS, **texts, effect="it is new")
        else:
            yield _lost(check, path, loss, new, texts)


def compare_tokens(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare what texts and chats become: as ``/tokenize`` says, and as ``/render`` says."""
    for name, before in old.tokens.items():
        yield _tokens(f"tokens, {name}", before, new.tokens.get(name, "not asked"))
    differing = [
        name
        for name, rendered in new.rendered.items()
        if _differ(rendered, new.tokens.get(name, ""))
        and not _differ(old.rendered.get(name, ""), old.tokens.get(name, ""))
    ]
    if differing:
        yield Finding(
            check="tokens, /render beside /tokenize",
            severity=Severity.DEGRADES,
            old="equal",
            new=f"differ for {'; '.join(differing)}",
            effect="where /render is not offered, prompts have other keys than the engine's blocks",
            advice="set tokenization.order of the ingress to render alone, if all engines offer it",
        )


def _version(old: EngineFacts, new: EngineFacts) -> Finding:
    texts = {"old": old.version or "not told", "new": new.version or "not told"}
    if texts["old"] == texts["new"]:
        return Finding(check="version", severity=Severity.SAME, **texts)
    tested = new.version in TESTED_VERSIONS
    listed = ", ".join(TESTED_VERSIONS)
    return Finding(
        check="version",
        severity=Severity.DIFFERS,
        **texts,
        effect="" if tested else f"nearkv's own tests run on vLLM {listed}, not on the new one",
        advice="" if tested else "run it as a canary first: docs/upgrades.md",
    )


def _model(old: EngineFacts, new: EngineFacts) -> Finding:
    names = [card.id for card in new.cards]
    if old.model in names:
        return Finding(check="model", severity=Severity.SAME, old=old.model, new=old.model)
    return Finding(
        check="model",
        severity=Severity.BREAKS,
        old=old.model,
        new=", ".join(names) or "none",
        effect="requests for the old name never go to the new engine, and its blocks count for "
        "another model",
        advice="give the new engine the same --served-model-name",
    )


def _adapters(old: EngineFacts, new: EngineFacts) -> Finding:
    before, after = (
        {card.id for card in facts.cards if card.parent is not None} for facts in (old, new)
    )
    lost = sorted(before - after)
    return same_or(
        "adapters",
        old=_listed(before),
        new=_listed(after),
        severity=Severity.BREAKS if lost else Severity.DIFFERS,
        effect=f"requests for {', '.join(lost)} go to the old engine only" if lost else "",
        advice="load the same adapters" if lost else "",
    )


def _longest(old: EngineFacts, new: EngineFacts) -> Finding:
    before, after = _longest_of(old), _longest_of(new)
    if before is None or after is None:
        return unknown("max_model_len", "not told", old=str(before), new=str(after))
    shorter = after < before
    return same_or(
        "max_model_len",
        old=str(before),
        new=str(after),
        severity=Severity.BREAKS if shorter else Severity.DIFFERS,
        effect=f"requests of over {after} tokens get an error from the new engine"
        if shorter
        else "longer requests get an error from the old engine",
        advice="set --max-model-len to the same value",
    )


def _longest_of(facts: EngineFacts) -> int | None:
    cards: dict[str, Card] = {card.id: card for card in facts.cards}
    return cards[facts.model].max_model_len if facts.model in cards else None


def _presence(path: str, status: int | None) -> str:
    if status is None:
        return _NO_ANSWER
    if status == _WRONG_METHOD and path == SLEEP:
        return _THERE
    if status in _NOT_THERE:
        return "not there"
    return "declined (403)" if status == _DECLINED else _THERE


def _lost(
    check: str, path: str, loss: _Loss, new: EngineFacts, texts: Mapping[str, str]
) -> Finding:
    """Return what the loss of an endpoint means; without any source of tokens it is more."""
    sources = (TOKENIZE, RENDER_TEXT, RENDER_CHAT)
    left = [each for each in sources if _presence(each, new.endpoints.get(each)) == _THERE]
    if path in sources and not left:
        return Finding(
            check=check,
            severity=Severity.BREAKS,
            **texts,
            effect="no source of tokens is left: prompts are routed without the cache",
            advice="give the ingress a tokenizer: tokenization.local",
        )
    return Finding(
        check=check, severity=loss.severity, **texts, effect=loss.effect, advice=loss.advice
    )


def _tokens(check: str, before: Tokens, after: Tokens) -> Finding:
    texts = {"old": _counted(before), "new": _counted(after)}
    if before == after:
        return Finding(check=check, severity=Severity.SAME, **texts)
    if isinstance(before, str):
        return unknown(check, "the old engine gives no tokens to compare with", **texts)
    if isinstance(after, str):
        return Finding(
            check=check,
            severity=Severity.BREAKS,
            **texts,
            effect="the new engine refuses what the old one takes",
            advice="give both engines the same tokenizer and --chat-template",
        )
    place = _first_difference(before, after)
    return Finding(
        check=check,
        severity=Severity.BREAKS,
        **texts,
        effect=f"differ from token {place} on: the ingress asks one engine for a prompt's tokens, "
        "so hits at engines of the other version are missed and predictions fail",
        advice=f"give both engines the same tokenizer and --chat-template, or {_SIDE_BY_SIDE}",
    )


def _first_difference(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the position, from 0, of the first token that differs."""
    pairs = zip(before, after, strict=False)
    shorter = min(len(before), len(after))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)


def _differ(one: Tokens, other: Tokens) -> bool:
    return not isinstance(one, str) and not isinstance(other, str) and one != other


def _counted(tokens: Tokens) -> str:
    return tokens if isinstance(tokens, str) else count_words(len(tokens), "token")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
