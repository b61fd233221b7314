"""Records of requests as tests want them."""

from nearkv.freshness import Freshness
from nearkv.ingress.decisions import DecisionRecord, SplitRecord
from nearkv.ingress.quoting import Quote
from nearkv.ingress.recording.anonymising import Anonymiser
from nearkv.ingress.recording.records import RequestRecord
from nearkv.ingress.recording.watching import RequestWatch, WatchRules
from nearkv.ingress.routing import Candidate


class Clock:
    """A clock that goes on by what it is told."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> float:
        self.now += seconds
        return self.now


def quote(engine, *, wait=0.0, recompute=0.0, load=0.0, disturb=0.0, held=0):
    cost = wait + recompute + load + disturb
    return Quote(engine, held, wait, recompute, load, disturb, cost)


def decision(engine="a", *, candidates=None, quotes=(), split=None, **fields):
    if candidates is None:
        candidates = [Candidate("a", cached_tokens=64), Candidate("b")]
    values = {
        "request_id": "r",
        "path": "/v1/completions",
        "model": "tiny",
        "policy": "cost",
        "reason": "prefix_hit",
        "rung": "fresh",
        "attempt": 0,
        "prompt_tokens": 100,
        "predicted_cached_tokens": 64,
        "tokens_from": "render",
        "first_token_ms": 40.0,
        **fields,
    }
    return DecisionRecord(
        engine=engine, candidates=candidates, quotes=quotes, split=split, **values
    )


def pair(**fields):
    values = {"outcome": "pd", "why": "cheaper", "prefill_engine": "p", "decode_engine": "d"}
    return SplitRecord(local_seconds=0.2, pair_seconds=0.1, **{**values, **fields})


def watch(clock, *, sinks=(), keeps_keys=False, trace=None, request_id="r"):
    record = RequestRecord(
        request_id=request_id, path="/v1/completions", at=1000.0, arrived_at=clock(), trace=trace
    )
    return RequestWatch(record, WatchRules(sinks, Anonymiser(b"s"), keeps_keys, clock))


class End:
    """How an answer ended."""

    def __init__(self, *, cached=None, output=None, chunks=None, error=None):
        self.reported_cached_tokens = cached
        self.output_tokens = output
        self.chunks = chunks
        self.error = error


def served(clock=None, **fields):
    """Return the record of a streamed answer: routed 10 ms, first byte 50 ms, end 250 ms on."""
    clock = clock or Clock()
    watched = watch(clock, trace=fields.pop("trace", None), request_id=fields.pop("id", "r"))
    watched.accepted(model="tiny", stream=True, tenant="", prefix_ids=())
    clock.after(0.010)
    watched.decided(decision(**fields), now=50.0, heard_at=[49.9, None])
    clock.after(0.050)
    watched.served("a", "prefix_hit", predicted=64)
    watched.began()
    clock.after(0.200)
    watched.ended(200, End(cached=64, output=7, chunks=8))
    watched.close()
    return watched.record


STALE = Candidate("c", freshness=Freshness.UNKNOWN)
