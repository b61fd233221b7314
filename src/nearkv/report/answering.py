"""From evidence to answers (pure)."""

from collections.abc import Callable, Sequence

import msgspec

from nearkv.break_even import Link
from nearkv.report.errors import UnknownFigureError
from nearkv.report.evidence import Evidence
from nearkv.report.separating import Measured, advised_ratio, separate
from nearkv.report.series import (
    AGENT_HIT_TOKENS,
    AGENT_MISSED_TOKENS,
    COMPUTED_TOKENS,
    DECODE_SECONDS,
    ENGINE_HITS_AND_ASKED,
    FIRST_BYTE_SECONDS,
    KV_BYTES,
    KV_TOKENS,
    PREDICTED_TOKENS,
    PREFILL_SECONDS,
    PROMPT_TOKENS,
    QUEUE_SECONDS,
    ROUTED_TOKENS,
    USED_RATIO,
)

_P99 = 0.99


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer in words; ``value`` is the figure behind it.

    Where it is ``unknown``, that says why, and there is no value.
    """

    id: str
    question: str
    text: str = ""
    value: float | None = None
    unit: str = ""
    unknown: str = ""


class Setting(msgspec.Struct, frozen=True):
    """What is assumed where nobody measures: the link, and KV bytes of a token if given."""

    link: Link
    kv_bytes_per_token: float | None = None


def answer_all(evidence: Evidence, setting: Setting) -> list[Answer]:
    """Return an answer to every question of a report."""
    questions: Sequence[tuple[str, str, Callable[[Evidence, Setting], Answer]]] = (
        ("prefill_share", "How much of requests' time is prefill?", _prefill_share),
        ("kv_use", "How full is the KV cache on average?", _kv_use),
        ("hit_rate", "How many prompt tokens were cached?", _hit_rate),
        ("predicted_hit_rate", "How many did routing expect to be?", _predicted_hit_rate),
        ("p99_source", "Does P99 come from prefill or decode?", _p99_source),
        ("first_byte_p99", "How long is P99 to the first byte, at the ingress?", _first_byte),
        ("prefill_rate", "How fast do engines prefill?", _prefill_rate),
        ("prefill_busy", "How much of engines' time do prompts take?", _prefill_busy),
        ("pd_gain", "What would separating prefill and decode gain?", _pd_gain),
        ("pd_ratio", "How many prefill and decode engines?", _pd_ratio),
    )
    return [_ask(name, question, find, evidence, setting) for name, question, find in questions]


def _ask(
    name: str,
    question: str,
    find: Callable[[Evidence, Setting], Answer],
    evidence: Evidence,
    setting: Setting,
) -> Answer:
    try:
        found = find(evidence, setting)
    except UnknownFigureError as error:
        return Answer(id=name, question=question, unknown=str(error))
    return msgspec.structs.replace(found, id=name, question=question)


def _found(text: str, value: float, unit: str) -> Answer:
    return Answer(id="", question="", text=text, value=value, unit=unit)


def _share_of(part: float, whole: float, nothing: str) -> float:
    if whole <= 0:
        raise UnknownFigureError(nothing)
    return part / whole


def _prefill_share(evidence: Evidence, _: Setting) -> Answer:
    prefill = evidence.histogram(PREFILL_SECONDS).total
    decode = evidence.histogram(DECODE_SECONDS).total
    share = _share_of(prefill, prefill + decode, "no request ended in the window")
    text = f"{share:.1%} (prefill {prefill:.1f} s, decode {decode:.1f} s of requests' time)"
    return _found(text, share, "ratio")


def _kv_use(evidence: Evidence, _: Setting) -> Answer:
    values = evidence.gauge_values(USED_RATIO)
    mean = sum(values) / len(values)
    text = f"{mean:.1%} (fullest engine {max(values):.1%}, of {len(values)})"
    return _found(text, mean, "ratio")


def _hit_rate(evidence: Evidence, _: Setting) -> Answer:
    hits, asked = _hits_and_asked(evidence)
    share = _share_of(hits, asked, "no prompt was looked up in the window")
    return _found(f"{share:.1%} of {asked:,.0f} prompt tokens", share, "ratio")


def _hits_and_asked(evidence: Evidence) -> tuple[float, float]:
    """Return tokens found and looked up, as agents tell, else as one kind of engine does."""
    counters = evidence.counters
    if AGENT_HIT_TOKENS in counters and AGENT_MISSED_TOKENS in counters:
        hits = counters[AGENT_HIT_TOKENS]
        return hits, hits + counters[AGENT_MISSED_TOKENS]
    for found, asked in ENGINE_HITS_AND_ASKED:
        if found in counters and asked in counters:
            return counters[found], counters[asked]
    return evidence.counter((AGENT_HIT_TOKENS,)), 0.0


def _predicted_hit_rate(evidence: Evidence, _: Setting) -> Answer:
    routed = evidence.counter(ROUTED_TOKENS)
    share = _share_of(
        evidence.counter(PREDICTED_TOKENS), routed, "no prompt was routed in the window"
    )
    return _found(f"{share:.1%} of {routed:,.0f} prompt tokens", share, "ratio")


def _p99_source(evidence: Evidence, _: Setting) -> Answer:
    """Compare the slow hundredths of the phases; the queue counts where it is known.

    Engines' buckets are wide: those of vLLM begin at 0.3 s. What lies in one is not told apart.
    """
    phases = {
        "prefill": evidence.histogram(PREFILL_SECONDS),
        "decode": evidence.histogram(DECODE_SECONDS),
    }
    if any(series in evidence.histograms for series in QUEUE_SECONDS):
        phases["queue"] = evidence.histogram(QUEUE_SECONDS)
    slow = {phase: histogram.quantile(_P99) or 0.0 for phase, histogram in phases.items()}
    if not any(histogram.count for histogram in phases.values()):
        raise UnknownFigureError("no request ended in the window")
    source = max(slow, key=lambda phase: slow[phase])
    bound = phases[source].bound_of(_P99)
    alike = [phase for phase, found in phases.items() if found.bound_of(_P99) == bound]
    if len(alike) > 1:
        means = ", ".join(f"{phase} {_time(phases[phase].mean)}" for phase in phases)
        raise UnknownFigureError(
            f"P99 of {' and '.join(alike)} is in one histogram bucket, up to {bound:g} s "
            f"(means: {means})"
        )
    listed = ", ".join(f"{phase} {_time(seconds)}" for phase, seconds in slow.items())
    return _found(f"{source} (P99: {listed})", slow[source], "seconds")


def _first_byte(evidence: Evidence, _: Setting) -> Answer:
    found = evidence.histogram(FIRST_BYTE_SECONDS).quantile(_P99)
    if found is None:
        raise UnknownFigureError("no request was answered in the window")
    return _found(_time(found), found, "seconds")


def _prefill_rate(evidence: Evidence, _: Setting) -> Answer:
    seconds = _seconds_per_token(evidence)
    return _found(f"{1 / seconds:,.0f} tokens/s", 1 / seconds, "tokens per second")


def _seconds_per_token(evidence: Evidence) -> float:
    computed = evidence.counter(COMPUTED_TOKENS)
    prefill = evidence.histogram(PREFILL_SECONDS).total
    if prefill <= 0:
        raise UnknownFigureError("no prompt was computed in the window")
    return _share_of(prefill, computed, "no prompt was computed in the window")


def _prefill_busy(evidence: Evidence, _: Setting) -> Answer:
    measured = _ratios(evidence)
    text = f"{measured[0]:.1%} (decoding {measured[1]:.1%}) of {evidence.engines} engines' time"
    return _found(text, measured[0], "ratio")


def _ratios(evidence: Evidence) -> tuple[float, float]:
    """Return the shares of engine time with prompts being computed, and with decoding.

    Requests decode side by side, so their time says only that at least so much was decoded.
    """
    prefill = evidence.histogram(PREFILL_SECONDS).total
    decode = evidence.histogram(DECODE_SECONDS).total
    if evidence.engine_seconds is None:
        raise UnknownFigureError(
            "engines' time is not known (metric process_start_time_seconds not found at "
            f"{evidence.where}); scrape twice with --interval"
        )
    nothing = "the window is empty"
    busy = min(1.0, _share_of(prefill, evidence.engine_seconds, nothing))
    return busy, min(1.0, decode / evidence.engine_seconds)


def _pd_gain(evidence: Evidence, setting: Setting) -> Answer:
    decode = evidence.histogram(DECODE_SECONDS)
    requests = decode.count
    nothing = "no request ended in the window"
    busy, decoding = _ratios(evidence)
    measured = Measured(
        prompt_tokens=_share_of(evidence.counter(PROMPT_TOKENS), requests, nothing),
        seconds_per_token=_seconds_per_token(evidence),
        decode_seconds=_share_of(decode.total, requests, nothing),
        busy_ratio=busy,
        decoding_ratio=decoding,
    )
    found = separate(measured, setting.link, _kv_bytes(evidence, setting))
    verdict = "pays" if found.pays else "does not pay"
    threshold = found.break_even_tokens
    pull = "never" if threshold is None else f"from {threshold:,} tokens"
    text = (
        f"{verdict}: at most {_time(found.gain_seconds)} less decode per request, for "
        f"{_time(found.price_seconds)} more to the first token over {setting.link.name} "
        f"(moving beats computing {pull})"
    )
    return _found(text, found.gain_seconds - found.price_seconds, "seconds per request")


def _kv_bytes(evidence: Evidence, setting: Setting) -> float:
    if setting.kv_bytes_per_token is not None:
        return setting.kv_bytes_per_token
    try:
        size, tokens = evidence.gauge_values(KV_BYTES), evidence.gauge_values(KV_TOKENS)
    except UnknownFigureError as error:
        raise UnknownFigureError(f"{error}; or give --kv-bytes-per-token") from error
    mean_tokens = sum(tokens) / len(tokens)
    return _share_of(sum(size) / len(size), mean_tokens, "the KV cache has no tokens")


def _pd_ratio(evidence: Evidence, _: Setting) -> Answer:
    busy, decoding = _ratios(evidence)
    if busy + decoding <= 0:
        raise UnknownFigureError("no request ended in the window")
    prefill, decode = advised_ratio(busy, decoding)
    engines = evidence.engines
    text = f"P : D = {prefill} : {decode}"
    if engines > 1:
        share = min(engines - 1, max(1, round(engines * prefill / (prefill + decode))))
        text += f" (of {engines} engines: {share} for prefill, {engines - share} for decode)"
    else:
        text += " (one engine cannot be split)"
    return _found(text, prefill / decode, "ratio")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
