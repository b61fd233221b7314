"""Two engines' KV events, block hashes and reported cache hits after one prompt (pure)."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from nearkv.agent.kv_events import Handle
from nearkv.cli.doctor_upgrade_model import (
    EngineFacts,
    Finding,
    PromptFacts,
    Replay,
    Reply,
    Severity,
    count_words,
    same_or,
    unknown,
)
from nearkv.cli.doctor_upgrade_traits import EventTraits, read_traits
from nearkv.state.model import TIER_DEVICE

_MASK = (1 << 64) - 1
_LOW_BYTES = 8
_CHANGED_FORM = "look for a release of nearkv that knows the new form"
_FALSE_HITS = "blocks of salted prompts or adapters look like plain ones: false hits"
_FIELD_LOSSES: Mapping[str, tuple[Severity, str]] = MappingProxyType(
    {
        "extra_keys": (Severity.BREAKS, _FALSE_HITS),
        "lora_name": (Severity.BREAKS, _FALSE_HITS),
        "medium": (Severity.DEGRADES, "all blocks count as being on the device"),
        "group_idx": (Severity.DEGRADES, "blocks of several KV groups are taken for one group's"),
        "kv_cache_spec_kind": (Severity.DEGRADES, "sliding windows are taken for full attention"),
    }
)
_HARMLESS_LOSS = (Severity.DIFFERS, "nearkv does without them")
_PASSED_OVER = frozenset({"unknown_tag", "not_reusable_kind"})


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


_completion = msgspec.json.Decoder(_Completion)


def compare_events(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare how events are written, and whether nearkv reads all it needs of them."""
    if old.prompt is None or new.prompt is None:
        yield unknown("KV events", "no prompt was sent", advice="leave out --no-prompt")
        return
    before = read_traits(old.prompt.messages, old.prompt.token_ids)
    after = read_traits(new.prompt.messages, new.prompt.token_ids)
    heard = _heard(old.prompt, before), _heard(new.prompt, after)
    yield _events(*heard)
    if before.stored_events and after.stored_events:
        yield from _forms(before, after)
        yield _fields(before, after)
        yield _stored(old.prompt, new.prompt, before, after)
        yield _hash_rule(old.prompt, new.prompt, before, after)
        yield _replay(old.prompt.replay, new.prompt.replay)


def compare_hits(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare the answers to a prompt that was sent before: the cached tokens they report."""
    if old.prompt is None or new.prompt is None:
        return
    replies = old.prompt.first, new.prompt.first
    if not all(reply.is_ok for reply in replies):
        texts = [_answered(reply) for reply in replies]
        only_new = replies[0].is_ok
        yield Finding(
            check="completion of one token",
            severity=Severity.BREAKS if only_new else Severity.UNKNOWN,
            old=texts[0],
            new=texts[1],
            effect="the new engine refuses what the old one takes"
            if only_new
            else replies[0].error,
        )
        return
    yield _reported(old, new)


def _heard(prompt: PromptFacts, traits: EventTraits) -> str:
    if traits.stored_events:
        return "heard"
    if traits.unread:
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(traits.unread.items()))
        return f"heard, but none can be read: {listed}"
    return prompt.trouble or "none heard"


def _events(old: str, new: str) -> Finding:
    if old == new == "heard":
        return Finding(check="KV events", severity=Severity.SAME, old=old, new=new)
    if new == "heard":
        why = "the old engine's were not heard: there is nothing to compare with"
        return unknown("KV events", why, old=old, new=new)
    if old != "heard":
        advice = "give --old-events and --new-events, and start engines with --kv-events-config"
        return unknown("KV events", "not heard", old=old, new=new, advice=advice)
    return Finding(
        check="KV events",
        severity=Severity.BREAKS,
        old=old,
        new=new,
        effect="the new engine's cache is invisible to routing",
        advice="start it with the same --kv-events-config; from here its port must be reachable",
    )


def _forms(before: EventTraits, after: EventTraits) -> Iterator[Finding]:
    yield _unread(before, after)
    yield same_or(
        "event encoding",
        old=before.encoding,
        new=after.encoding,
        severity=Severity.DIFFERS,
        effect="nearkv reads both; other readers may not",
    )
    yield same_or(
        "block hashes",
        old=before.hash_form,
        new=after.hash_form,
        severity=Severity.DIFFERS,
        effect="nearkv takes them as they are; other readers may not",
    )
    yield same_or(
        "event topic",
        old=before.topic or "none",
        new=after.topic or "none",
        severity=Severity.DIFFERS,
        effect="the agent takes all topics; other readers may not",
    )
    lost_device = TIER_DEVICE in before.media and TIER_DEVICE not in after.media
    yield same_or(
        "tiers",
        old=_listed(before.media),
        new=_listed(after.media),
        severity=Severity.BREAKS if lost_device else Severity.DIFFERS,
        effect="blocks on the device count as being in a slower tier" if lost_device else "",
        advice=_CHANGED_FORM if lost_device else "",
    )
    yield same_or(
        "KV groups",
        old=_listed(before.groups),
        new=_listed(after.groups),
        severity=Severity.DEGRADES,
        effect="with several kinds of KV cache, predicted hits may not come true",
    )


def _unread(before: EventTraits, after: EventTraits) -> Finding:
    fresh = {reason for reason in after.unread if reason not in before.unread}
    return same_or(
        "events that nearkv passes over",
        old=_listed(before.unread),
        new=_listed(after.unread),
        severity=Severity.DIFFERS
        if not fresh
        else Severity.DEGRADES
        if fresh <= _PASSED_OVER
        else Severity.BREAKS,
        effect="blocks in them are not seen" if fresh else "",
        advice=_CHANGED_FORM if fresh else "",
    )


def _fields(before: EventTraits, after: EventTraits) -> Finding:
    lost, added = before.fields - after.fields, after.fields - before.fields
    losses = [_FIELD_LOSSES.get(name, _HARMLESS_LOSS) for name in sorted(lost)]
    order, told = list(Severity), count_words(len(before.fields), "field")
    worst = min((severity for severity, _ in losses), key=order.index, default=Severity.DIFFERS)
    return same_or(
        "fields of stored blocks",
        old=told,
        new=f"without {_listed(lost)}; with {_listed(added)}" if lost or added else told,
        severity=worst,
        effect="; ".join(dict.fromkeys(effect for _, effect in losses))
        or "nearkv passes over what it does not know",
        advice=_CHANGED_FORM if worst in (Severity.BREAKS, Severity.DEGRADES) else "",
    )


def _stored(old: PromptFacts, new: PromptFacts, before: EventTraits, after: EventTraits) -> Finding:
    check = "blocks of the prompt"
    texts = {"old": _covered(old, before), "new": _covered(new, after)}
    if old.token_ids is None or new.token_ids is None:
        return unknown(check, "/tokenize does not tell the prompt's tokens", **texts)
    if _is_whole(new, after) or not _is_whole(old, before):
        return same_or(check, **texts, severity=Severity.DIFFERS)
    return Finding(
        check=check,
        severity=Severity.BREAKS,
        **texts,
        effect="events do not name the tokens that /tokenize gives: hits are missed",
        advice="look at the tokenizer, and at what the engine puts in front of prompts",
    )


def _hash_rule(
    old: PromptFacts, new: PromptFacts, before: EventTraits, after: EventTraits
) -> Finding:
    """Say whether equal prompts have equal hashes; nearkv has keys of its own (docs/engines.md)."""
    check = "hash rule"
    pairs = list(zip(before.handles, after.handles, strict=False))
    comparable = old.token_ids == new.token_ids and before.block_size == after.block_size
    if not pairs or not comparable:
        return unknown(check, "no equal blocks to compare hashes of")
    equal = all(_low_bits(one) == _low_bits(other) for one, other in pairs)
    return Finding(
        check=check,
        severity=Severity.SAME if equal else Severity.DIFFERS,
        old=f"{count_words(len(pairs), 'block')}",
        new="equal hashes" if equal else "other hashes",
        effect=""
        if equal
        else "nearkv's keys are its own; caches that are shared by the engines' hashes (stock "
        "connectors, LMCache) start empty, also if only the seed differs",
    )


def _replay(old: Replay | None, new: Replay | None) -> Finding:
    check = "replay of events"
    texts = {"old": _framing(old), "new": _framing(new)}
    if old is not None and old.messages and (new is None or not new.messages):
        return Finding(
            check=check,
            severity=Severity.DEGRADES,
            **texts,
            effect="an agent that is restarted does not know the blocks stored before",
            advice="set replay_endpoint in --kv-events-config",
        )
    return same_or(check, **texts, severity=Severity.DIFFERS, effect="nearkv reads both framings")


def _reported(old: EngineFacts, new: EngineFacts) -> Finding:
    assert old.prompt is not None  # noqa: S101 (for the type checker: compare_hits looked)
    assert new.prompt is not None  # noqa: S101 (as above)
    before, after = cached_tokens_of(old.prompt.again), cached_tokens_of(new.prompt.again)
    check = "cached tokens of the same prompt again"
    texts = {"old": _told(before), "new": _told(after)}
    if before is not None and after is None:
        return Finding(
            check=check,
            severity=Severity.DEGRADES,
            **texts,
            effect="predictions are not checked: an engine that disagrees is not found out",
            advice="start the engine with --enable-prompt-tokens-details",
        )
    if before and not after:
        return Finding(
            check=check,
            severity=Severity.BREAKS,
            **texts,
            effect="hits do not come true: nothing is gained by routing to the same engine",
            advice="start the engine with --enable-prefix-caching",
        )
    return same_or(
        check,
        **texts,
        severity=Severity.DIFFERS,
        effect="the ingress corrects its predictions by what engines report",
    )


def cached_tokens_of(reply: Reply) -> int | None:
    """Return the cached tokens that an answer reports, ``None`` where it does not."""
    try:
        usage = _completion.decode(reply.body).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    details = None if usage is None else usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _is_whole(prompt: PromptFacts, traits: EventTraits) -> bool:
    size = traits.block_size
    return bool(prompt.token_ids and size) and traits.stored_tokens == (
        len(prompt.token_ids or ()) // (size or 1) * (size or 1)
    )


def _covered(prompt: PromptFacts, traits: EventTraits) -> str:
    tokens = "?" if prompt.token_ids is None else str(len(prompt.token_ids))
    return f"{traits.stored_tokens} of {tokens} tokens, in blocks of {traits.block_size}"


def _low_bits(handle: Handle) -> int:
    """Return the 64 bits that engines send where they send integers; some send them signed."""
    if isinstance(handle, bytes):
        return int.from_bytes(handle[-_LOW_BYTES:], "big")
    return handle & _MASK


def _framing(replay: Replay | None) -> str:
    if replay is None:
        return "not answered"
    if not replay.messages:
        return "answered with nothing of what was just sent"
    return "with the topic" if replay.framing == "topic" else "without the topic"


def _answered(reply: Reply) -> str:
    return reply.error if reply.status is None else f"status {reply.status}"


def _told(cached_tokens: int | None) -> str:
    return "not reported" if cached_tokens is None else count_words(cached_tokens, "token")


def _listed(names: frozenset[str] | Mapping[str, int]) -> str:
    return ", ".join(sorted(names)) or "none"
