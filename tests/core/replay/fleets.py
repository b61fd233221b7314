"""Small fleets and traces for tests of the replay."""

import json

from nearkv.ingress.settings import IngressSettings
from nearkv.replay.engine_model import EngineProfile
from nearkv.replay.fleet_feed import EngineSpec
from nearkv.replay.running import Fleet, Variant
from nearkv.replay.simulation import Surroundings
from nearkv.replay.traces import Arrival, Trace, chain_ids

BLOCK = 16


def profile(**fields):
    usual = {
        "blocks": 1000,
        "block_tokens": BLOCK,
        "prefill_tokens_per_second": 1000.0,
        "chunk_tokens": 100,
        "step_seconds": 0.01,
        "step_seconds_per_request": 0.0,
        "step_seconds_per_kv_token": 0.0,
    }
    return EngineProfile(**(usual | fields))


def fleet_of(count, *, roles=None, link=None, **fields):
    roles = roles or ["both"] * count
    specs = [EngineSpec(f"e{n}", role, profile(**fields)) for n, role in enumerate(roles)]
    return Fleet(specs, Surroundings(link=link))


def variant(policy="cost", **settings):
    return Variant(policy, policy, IngressSettings(policy=policy, **settings))


def arrival(at, group, *, blocks=10, output_tokens=5, **fields):
    """Return a request whose whole prompt is that of its group, and a few tokens more."""
    keys = chain_ids([group, *range(1, blocks)])
    return Arrival(at, blocks * BLOCK + 3, output_tokens, keys, **fields)


def trace_of(*arrivals):
    return Trace("made", arrivals, BLOCK)


def public_line(timestamp=0, input_length=1030, output_length=7, hash_ids=(1, 2, 3)):
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": list(hash_ids),
        }
    ).encode()


def record_line(**fields):
    usual = {
        "at_seconds": 1_700_000_000.0,
        "model": "m",
        "session": "",
        "priority": 0,
        "prompt_tokens": 40,
        "block_tokens": 16,
        "output_tokens": 5,
        "output_chunks": 5,
        "hash_ids": [7, 8],
    }
    return json.dumps(usual | fields).encode()
