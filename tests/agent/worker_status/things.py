"""Reports and a schema checker for tests."""

import re
from pathlib import Path

import msgspec

from nearkv.agent.worker_status.composing import NodeFacts, Report
from nearkv.agent.worker_status.conditions import ConditionBook, judge
from nearkv.agent.worker_status.observing import EngineFacts
from nearkv.freshness import FreshnessLimits
from nearkv.node_summary import DeviceSummary, PathSummary
from nearkv.state.model import EngineState, EventsState

CRD = Path(__file__).parents[3] / "deploy" / "crds" / "workerstatuses.nearkv.io.yaml"
DOCUMENT = Path(__file__).parents[3] / "docs" / "worker-status.md"
STAMP = "2026-11-30T12:00:00Z"
GIB = 1 << 30
_KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_BOUNDS = {
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def crd():
    """Return the CustomResourceDefinition."""
    return msgspec.yaml.decode(CRD.read_bytes())


def documented_role():
    """Return the ClusterRole that the documentation says the agent needs."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("```yaml\n# rights\n")
    return msgspec.yaml.decode(rest.partition("```")[0])


def documented_rights():
    """Return these rights as (verb, resource)."""
    return {
        (verb, resource)
        for rule in documented_role()["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }


def schema_of_status():
    """Return the schema of ``status``."""
    (version,) = crd()["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["status"]


def complaints(value, schema, path="status"):
    """Yield what a schema has against a value; fields that it does not know would be dropped."""
    kind = schema["type"]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{path}: {value!r} is no {kind}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    elif not re.search(schema.get("pattern", ""), str(value)):
        yield f"{path}: {value!r} does not match"
    else:
        size = value if kind in ("integer", "number", "boolean") else len(value)
        least, most = _BOUNDS.get(kind, ("", ""))
        if not schema.get(least, size) <= size <= schema.get(most, size):
            yield f"{path}: {size} is out of range"
        if kind == "array":
            for number, item in enumerate(value):
                yield from complaints(item, schema["items"], f"{path}[{number}]")
        elif kind == "object":
            yield from _complaints_of_fields(value, schema, path)


def _complaints_of_fields(value, schema, path):
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: is missing"
    for name, item in value.items():
        part = known.get(name, schema.get("additionalProperties"))
        if part is None:
            yield f"{path}.{name}: is not in the schema"
        else:
            yield from complaints(item, part, f"{path}.{name}")


def facts(**fields):
    """Return the facts of an engine that serves."""
    known = {
        "role": "decode",
        "group": "llama",
        "model": "meta-llama/Llama-3-8B",
        "version": "0.33.0",
        "ranks": 1,
        "state": EngineState.READY,
        "events": EventsState.LIVE,
        "metrics_age_seconds": 1.0,
        "can_transfer": True,
        "kv_used_ratio": 0.4,
        "kv_total_bytes": 20 * GIB,
        "kv_held_bytes": 10 * GIB,
        "kv_bytes_per_token": 131072,
        "prefill_tokens_per_second": 4321.0,
        "requests_running": 7,
        "requests_waiting": 1,
        "blocks": {"GPU": 5000},
    }
    return EngineFacts(**{**known, **fields})


def report(engine=None, *, used_ratio=0.4, held_ratio=0.5, **fields):
    """Return a report of an engine."""
    engine = engine or facts()
    book = ConditionBook(settle_seconds=10.0)
    verdicts = judge(engine, FreshnessLimits(), used_ratio=used_ratio, was_pressed=False)
    book.take(verdicts, now=0.0, stamp=STAMP)
    return Report(
        **{
            "node": "gpu-1",
            "observed_at": STAMP,
            "interval_seconds": 300.0,
            "facts": engine,
            "used_ratio": used_ratio,
            "held_ratio": held_ratio,
            "conditions": book.conditions,
            **fields,
        }
    )


def devices(count=8, **fields):
    """Return GPUs of a node."""
    return [
        DeviceSummary(
            id=f"GPU-8a56a4bc-e184-a047-2620-{number:012}",
            total_bytes=80 * GIB,
            used_bytes=40 * GIB,
            **{"health": "ok", "pod_uid": "0f7e8a3c-6f0b-4a53-9d0c-2f3e7c1d9a10", **fields},
        )
        for number in range(count)
    ]


def paths(count=4):
    """Return measured paths."""
    return [
        PathSummary(
            source=f"gpu-{number}",
            transport="tcp",
            setup_seconds=0.0012345,
            bytes_per_second=1.23456789e9,
            count=10,
            age_seconds=12.3456,
        )
        for number in range(count)
    ]


def node_facts(**fields):
    """Return what a node says of itself."""
    return NodeFacts(**{"devices": devices(), "rdma": True, "paths": paths(), **fields})
