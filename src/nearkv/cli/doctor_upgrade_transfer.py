"""Whether KV still moves: transfer parameters of two engines, and their agents (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from nearkv.cli.doctor_upgrade_model import (
    AgentFacts,
    EngineFacts,
    Finding,
    Reply,
    Severity,
    count_words,
    same_or,
    unknown,
)

_OFF = "none"
_OURS = "nearkv's connector"
_STOCK = "vLLM's own connector"
_OUR_KEY = "remote_lease_id"


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_answer = msgspec.json.Decoder(_Answer)


def compare_transfer(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare what prefill engines hand over for the decode engine."""
    if old.prompt is None or new.prompt is None:
        return
    before, after = params_of(old.prompt.handed_over), params_of(new.prompt.handed_over)
    kinds = _kind(before), _kind(after)
    check = "transfer of KV"
    if kinds[0] == kinds[1]:
        yield Finding(check=check, severity=Severity.SAME, old=kinds[0], new=kinds[1])
    elif before is None:
        yield Finding(check=check, severity=Severity.DIFFERS, old=kinds[0], new=kinds[1])
    else:
        yield Finding(
            check=check,
            severity=Severity.BREAKS,
            old=kinds[0],
            new=kinds[1],
            effect="the new engine gets no KV from others and gives none: prompts are computed "
            "where they are decoded",
            advice="start it with the same --kv-transfer-config",
        )
        return
    if before is None or after is None:
        return
    yield _keys(before, after)
    if kinds[0] == _STOCK and old.version != new.version:
        yield Finding(
            check="pairs of prefill and decode",
            severity=Severity.DEGRADES,
            old=old.version or "not told",
            new=new.version or "not told",
            effect="vLLM's own connector refuses other versions, so the ingress pairs equal ones "
            "only: while both run, each needs prefill and decode engines of its own",
            advice="upgrade prefill and decode together, as a canary of both",
        )


def compare_agents(
    old: EngineFacts, new: EngineFacts, agents: Sequence[AgentFacts]
) -> Iterator[Finding]:
    """Compare what agents say of their protocol, and of the two engines' KV."""
    for agent in agents:
        if agent.error:
            yield unknown(f"agent {agent.url}", agent.error)
    documents = [agent.document for agent in agents if agent.document is not None]
    transfers = [_mapping(document.get("transfer")) for document in documents]
    active = [transfer for transfer in transfers if transfer]
    if not active:
        return
    yield _versions("protocol between agent and connector", active, "protocol")
    yield _versions("version of state packets", active, "packet")
    yield _compat(old, new, documents)


def params_of(reply: Reply) -> dict[str, Any] | None:
    """Return the transfer parameters in an answer, ``None`` where there are none."""
    try:
        return _answer.decode(reply.body).kv_transfer_params or None
    except (msgspec.DecodeError, RecursionError):
        return None


def _kind(params: Mapping[str, Any] | None) -> str:
    if params is None:
        return _OFF
    return _OURS if _OUR_KEY in params else _STOCK


def _keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> Finding:
    lost, added = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    told = count_words(len(before), "key")
    return same_or(
        "transfer parameters",
        old=told,
        new=f"without {', '.join(lost) or 'none'}; with {', '.join(added) or 'none'}"
        if lost or added
        else told,
        severity=Severity.DIFFERS,
        effect="the ingress passes them on as they are; whether the decode engine takes them is "
        "up to its version",
    )


def _versions(check: str, transfers: Sequence[Mapping[str, Any]], key: str) -> Finding:
    found = sorted({str(transfer.get(key, "not told")) for transfer in transfers})
    if found == ["not told"]:
        return unknown(check, "the agents are of a release that does not tell")
    if len(found) == 1:
        return Finding(check=check, severity=Severity.SAME, old=found[0], new=found[0])
    return Finding(
        check=check,
        severity=Severity.BREAKS,
        old=", ".join(found),
        new="not the same everywhere",
        effect="KV does not move between nodes of unequal versions",
        advice="bring agents and the connectors in engines' images to one release of nearkv",
    )


def _compat(old: EngineFacts, new: EngineFacts, documents: Sequence[Mapping[str, Any]]) -> Finding:
    check = "KV of one for the other"
    before, after = (_compat_of(facts, documents) for facts in (old, new))
    if len(before) != 1 or len(after) != 1:
        why = "the agents do not know one registration of each engine, by its URL or version"
        texts = {"old": _listed(before), "new": _listed(after)}
        return unknown(check, why, **texts, advice="give URLs as the agents have them")
    return same_or(
        check,
        old=_listed(before),
        new=_listed(after),
        severity=Severity.DEGRADES,
        effect="model, dtype, layout or block size differ: KV does not move between the two, and "
        "is computed again",
        advice="each version needs prefill and decode engines of its own while both run",
    )


def _compat_of(facts: EngineFacts, documents: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the digests of what must be equal, of engines with this URL, else this version."""
    by_url: set[str] = set()
    by_version: set[str] = set()
    for document in documents:
        registered = {
            entry.get("id"): entry.get("compat")
            for entry in _entries(_mapping(document.get("transfer")))
        }
        for engine in _entries(document):
            compat = registered.get(engine.get("id"))
            if not isinstance(compat, str):
                continue
            if str(engine.get("url", "")).rstrip("/") == facts.url.rstrip("/"):
                by_url.add(compat)
            elif facts.version and engine.get("engine_version") == facts.version:
                by_version.add(compat)
    return by_url or by_version


def _entries(holder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = holder.get("engines")
    return [_mapping(entry) for entry in found] if isinstance(found, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _listed(digests: set[str]) -> str:
    return ", ".join(sorted(digests)) or "not registered"
