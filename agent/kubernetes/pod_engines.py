"""From a pod to the engine in it (pure).

Labels say what the engine is for, annotations how it is reached. Whoever may make a pod writes
them, so they only choose ports of the pod's own address, never another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import SecretStr, ValidationError

from nearkv.agent.discovering import EngineSpec, configured_engines
from nearkv.agent.errors import AgentError
from nearkv.agent.settings import ConfiguredEngine
from nearkv.kube.objects import Pod

_PREFIX = "nearkv.io/"
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "kind": "engine-kind",
        "dp_size": "dp-size",
        "key_model": "key-model",
        "kv_bytes_per_token": "kv-bytes-per-token",
        "topic": "kv-events-topic",
        "transfer": "transfer",
    }
)
"""Fields of a configured engine by the annotation that sets them."""
_PORT = "port"
_EVENTS_PORT = "kv-events-port"
_REPLAY_PORT = "kv-replay-port"
_ROLES = frozenset({"prefill", "decode", "both"})
_MAX_PORT = 65535
_MAX_RANKS = 256
_LONGEST_VALUE = 512


class PodUnreadableError(AgentError):
    """A pod's annotation makes no sense; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRules:
    """Which pods are engines, and what holds for those that do not say.

    With ``every`` each pod is one: the API server selected them. ``port`` is that of HTTP.
    """

    group_labels: tuple[str, ...] = ("nearkv.io/group",)
    role_labels: tuple[str, ...] = ("nearkv.io/role", "llm-d.ai/role")
    every: bool = False
    port: int = 8000
    api_key: SecretStr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEngine:
    """The engine in a pod. ``transfer`` is how its KV moves: agent, nixl or off.

    ``is_ready`` is the pod's condition, ``is_leaving`` that its deletion was asked for.
    """

    uid: str
    namespace: str
    name: str
    spec: EngineSpec
    transfer: str
    is_ready: bool
    is_leaving: bool

    @property
    def pod(self) -> str:
        """The pod as people name it."""
        return f"{self.namespace}/{self.name}"


def is_engine(pod: Pod, rules: PodRules) -> bool:
    """Tell whether a pod holds an engine, running or not."""
    keys = (*rules.group_labels, *rules.role_labels)
    return rules.every or any(pod.labels.get(key) for key in keys)


def is_running(pod: Pod) -> bool:
    """Tell whether a pod's engine can be asked: it has an address, and something runs in it."""
    return pod.phase == "Running" and bool(pod.status.pod_ip)


def read_engine(pod: Pod, rules: PodRules) -> PodEngine:
    """Return the engine of a pod that runs; raises :class:`PodUnreadableError`."""
    described = _describe(pod, rules)
    return PodEngine(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        spec=configured_engines([described])[0],
        transfer=described.transfer,
        is_ready=pod.is_ready,
        is_leaving=pod.is_terminating,
    )


def _describe(pod: Pod, rules: PodRules) -> ConfiguredEngine:
    address = pod.status.pod_ip or ""
    host = f"[{address}]" if ":" in address else address
    said = {name: _annotation(pod, annotation) for name, annotation in _FIELDS.items()}
    fields: dict[str, object] = {name: value for name, value in said.items() if value}
    for name, annotation in (("kv_events", _EVENTS_PORT), ("kv_replay", _REPLAY_PORT)):
        port = _port(pod, annotation)
        if port is not None:
            fields[name] = f"tcp://{host}:{port}"
    group = _first(pod.labels, rules.group_labels)
    if group:
        fields["group"] = group
    role = _first(pod.labels, rules.role_labels)
    fields["role"] = role if role in _ROLES else "both"
    fields["api_key"] = rules.api_key
    url = f"http://{host}:{_port(pod, _PORT) or rules.port}"
    try:
        engine = ConfiguredEngine.model_validate({"id": pod.uid, "url": url, **fields})
    except ValidationError as error:
        raise PodUnreadableError(_explain(error)) from error
    if engine.dp_size > _MAX_RANKS:
        raise PodUnreadableError(f"annotation {_PREFIX}dp-size: at most {_MAX_RANKS}")
    return engine


def _first(labels: Mapping[str, str], keys: tuple[str, ...]) -> str:
    return next((labels[key] for key in keys if labels.get(key)), "")


def _annotation(pod: Pod, name: str) -> str:
    value = pod.annotations.get(_PREFIX + name, "").strip()
    if len(value) > _LONGEST_VALUE:
        raise PodUnreadableError(
            f"annotation {_PREFIX}{name}: {len(value)} characters, at most {_LONGEST_VALUE}"
        )
    return value


def _port(pod: Pod, name: str) -> int | None:
    value = _annotation(pod, name)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= _MAX_PORT):
        raise PodUnreadableError(f"annotation {_PREFIX}{name}: {value[:40]!r} is no port")
    return int(value)


def _explain(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_context=False)[0]
    field = str(detail["loc"][0]) if detail["loc"] else ""
    annotation = {"kv_replay": _REPLAY_PORT, "kv_events": _EVENTS_PORT, **_FIELDS}.get(field, field)
    return f"annotation {_PREFIX}{annotation}: {detail['msg']}"
