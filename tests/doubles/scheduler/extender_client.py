"""One extender as kube-scheduler sees it: what is sent, and how answers are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.doubles.scheduler.clocks import Now
from tests.doubles.scheduler.configuration import ExtenderConfig
from tests.doubles.scheduler.go_http import GoHttpClient, TransportError
from tests.doubles.scheduler.go_json import (
    GoJsonError,
    Json,
    decode,
    encode,
    list_of,
    map_of,
    plain,
    read_int64,
    read_string,
    read_struct,
    sort_keys,
    wrap_int64,
)
from tests.doubles.scheduler.objects import NodeInfo, PodInfo
from tests.doubles.scheduler.wire_order import arrange_node, arrange_pod

_SCORE_FACTOR = 10  # the scheduler's scores go to 100, an extender's to 10
_CALLS_KEPT = 10_000


class ExtenderError(Exception):
    """A call failed; ``reason`` says how: a transport's, ``status``, ``decode`` or ``answer``."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was made, for tests to look at."""

    verb: str
    pod_uid: str
    nodes: tuple[str, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Filtered:
    """What a filter call left: names in the order of the answer, and why others failed."""

    nodes: list[str]
    failed: Mapping[str, str] = field(default_factory=dict)
    unresolvable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Victims:
    """Pods that would have to go from a node."""

    pods: Sequence[PodInfo]
    pdb_violations: int = 0


class Extender:
    """A client for one extender; ``calls`` records them, the last ones only."""

    def __init__(self, config: ExtenderConfig, *, now: Now, notices_close: bool = True) -> None:
        self.config = config
        self.calls: list[Call] = []
        self.client = GoHttpClient(config.timeout, now, tls=config.tls, notices_close=notices_close)

    def is_interested(self, pod: PodInfo) -> bool:
        """Tell whether the pod names a managed resource; without any, every pod is sent."""
        managed = self.config.managed_resources
        return not managed or bool(managed & pod.named_resources)

    async def filter(self, pod: PodInfo, nodes: Sequence[NodeInfo]) -> Filtered:
        """Ask which nodes are left; raises :class:`ExtenderError`."""
        names = [node.name for node in nodes]
        if not self.config.filter_verb:
            return Filtered(names)
        answer = await self._send(self.config.filter_verb, pod, nodes)
        try:
            result = _read_filter_result(answer)
        except GoJsonError as error:
            raise self._failed(error) from error
        if result.get("Error"):
            raise self._note(ExtenderError(result["Error"], "answer"))
        left = self._left(result, frozenset(names))
        return Filtered(
            left, result.get("FailedNodes", {}), result.get("FailedAndUnresolvableNodes", {})
        )

    def _left(self, result: Json, sent: frozenset[str]) -> list[str]:
        if self.config.node_cache_capable and "NodeNames" in result:
            for name in result["NodeNames"]:
                if name not in sent:
                    message = (
                        f'extender "{self.config.url_prefix}" names node "{name}", '
                        "which was not in the list it was sent"
                    )
                    raise self._note(ExtenderError(message, "answer"))
            names: list[str] = result["NodeNames"]
            return names
        items = result.get("Nodes", {}).get("items", ())
        return [item.get("metadata", {}).get("name", "") for item in items]

    async def prioritize(self, pod: PodInfo, nodes: Sequence[NodeInfo]) -> dict[str, int]:
        """Ask for scores and return the points they add; raises :class:`ExtenderError`.

        Points of hosts named more than once add up; hosts that were not sent are in it too.
        """
        if not self.config.prioritize_verb:
            return {}
        answer = await self._send(self.config.prioritize_verb, pod, nodes)
        try:
            scores = _read_scores(answer)
        except GoJsonError as error:
            raise self._failed(error) from error
        points: dict[str, int] = {}
        for host, score in scores:
            added = wrap_int64(wrap_int64(score * self.config.weight) * _SCORE_FACTOR)
            points[host] = wrap_int64(points.get(host, 0) + added)
        return points

    async def preempt(
        self, pod: PodInfo, candidates: Mapping[str, Victims], nodes: Mapping[str, NodeInfo]
    ) -> dict[str, Victims]:
        """Ask which candidates for preemption stay; raises :class:`ExtenderError`."""
        body = encode_preemption(pod, candidates, by_uid=self.config.node_cache_capable)
        answer = await self._post(self.config.preempt_verb, pod, tuple(candidates), body)
        try:
            metas = _read_preemption_result(answer)
        except GoJsonError as error:
            raise self._failed(error) from error
        return {
            name: Victims([self._pod_on(nodes, name, uid) for uid in uids], violations)
            for name, (uids, violations) in metas.items()
        }

    def _pod_on(self, nodes: Mapping[str, NodeInfo], name: str, uid: str) -> PodInfo:
        node = nodes.get(name)
        if node is None:
            raise self._note(ExtenderError(f"nodeinfo not found for node name {name}", "answer"))
        found = node.pods.get(uid)
        if found is None:
            message = f"extender claims to preempt pod {uid} on node {name}; it is not there"
            raise self._note(ExtenderError(message, "answer"))
        return found

    async def bind(self, pod: PodInfo, node: str) -> None:
        """Have the extender bind; raises :class:`ExtenderError`."""
        body = encode_binding(pod, node)
        answer = await self._post(self.config.bind_verb, pod, (node,), body)
        try:
            result = read_struct(answer, {"Error": read_string}, "ExtenderBindingResult")
        except GoJsonError as error:
            raise self._failed(error) from error
        if result.get("Error"):
            raise self._note(ExtenderError(result["Error"], "answer"))

    async def _send(self, verb: str, pod: PodInfo, nodes: Sequence[NodeInfo]) -> object:
        body = encode_args(pod, nodes, names_only=self.config.node_cache_capable)
        return await self._post(verb, pod, tuple(node.name for node in nodes), body)

    async def _post(self, verb: str, pod: PodInfo, nodes: tuple[str, ...], body: bytes) -> object:
        del self.calls[:-_CALLS_KEPT]
        self.calls.append(Call(verb, pod.uid, nodes))
        url = f"{self.config.url_prefix.rstrip('/')}/{verb}"
        try:
            reply = await self.client.post(url, body)
        except TransportError as error:
            raise self._note(ExtenderError(str(error), error.reason)) from error
        if reply.status != 200:
            message = f"failed {verb} with extender at URL {url}, code {reply.status}"
            raise self._note(ExtenderError(message, "status"))
        try:
            return decode(reply.body)
        except GoJsonError as error:
            raise self._failed(error) from error

    def _failed(self, error: GoJsonError) -> ExtenderError:
        return self._note(ExtenderError(str(error), "decode"))

    def _note(self, error: ExtenderError) -> ExtenderError:
        last = self.calls[-1]
        self.calls[-1] = Call(last.verb, last.pod_uid, last.nodes, error.reason)
        return error


def encode_args(pod: PodInfo, nodes: Sequence[NodeInfo], *, names_only: bool) -> bytes:
    """Return the body of a filter or prioritize call."""
    args: Json = {"Pod": arrange_pod(pod.document), "Nodes": None, "NodeNames": None}
    if names_only:
        args["NodeNames"] = [node.name for node in nodes]
    else:
        items = [arrange_node(node.document) for node in nodes]
        args["Nodes"] = {"metadata": {}, "items": items or None}
    return encode(args)


def encode_preemption(pod: PodInfo, candidates: Mapping[str, Victims], *, by_uid: bool) -> bytes:
    """Return the body of a preempt call."""
    args: Json = {
        "Pod": arrange_pod(pod.document),
        "NodeNameToVictims": None,
        "NodeNameToMetaVictims": None,
    }
    key = "NodeNameToMetaVictims" if by_uid else "NodeNameToVictims"
    args[key] = sort_keys(
        {
            name: {
                "Pods": [
                    {"UID": one.uid} if by_uid else arrange_pod(one.document)
                    for one in victims.pods
                ],
                "NumPDBViolations": victims.pdb_violations,
            }
            for name, victims in candidates.items()
        }
    )
    return encode(args)


def encode_binding(pod: PodInfo, node: str) -> bytes:
    """Return the body of a bind call."""
    return encode(
        {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": node}
    )


def _read_filter_result(answer: object) -> Json:
    reasons = map_of(_read_nullable_string)
    return read_struct(
        answer,
        {
            "Nodes": _read_node_list,
            "NodeNames": list_of(_read_nullable_string),
            "FailedNodes": reasons,
            "FailedAndUnresolvableNodes": reasons,
            "Error": read_string,
        },
        "ExtenderFilterResult",
    )


def _read_node_list(value: object) -> Json:
    found = read_struct(value, {"items": list_of(_read_node)}, "v1.NodeList")
    return {"items": [plain(item) for item in found.get("items", ())]}


def _read_node(value: object) -> Json:
    return read_struct(value, {"metadata": _read_meta}, "v1.Node")


def _read_meta(value: object) -> Json:
    return read_struct(value, {"name": read_string}, "v1.ObjectMeta")


def _read_nullable_string(value: object) -> str:
    return "" if value is None else read_string(value)


def _read_scores(answer: object) -> list[tuple[str, int]]:
    if answer is None:
        return []
    fields = {"Host": read_string, "Score": read_int64}
    entries = list_of(lambda item: read_struct(item, fields, "HostPriority"))(answer)
    return [(entry.get("Host", ""), entry.get("Score", 0)) for entry in entries]


def _read_preemption_result(answer: object) -> dict[str, tuple[list[str], int]]:
    meta_pod = list_of(lambda item: read_struct(item, {"UID": read_string}, "MetaPod"))
    victims = {"Pods": meta_pod, "NumPDBViolations": read_int64}
    result = read_struct(
        answer,
        {"NodeNameToMetaVictims": map_of(lambda one: read_struct(one, victims, "MetaVictims"))},
        "ExtenderPreemptionResult",
    )
    return {
        name: ([pod.get("UID", "") for pod in one.get("Pods", ())], one.get("NumPDBViolations", 0))
        for name, one in result.get("NodeNameToMetaVictims", {}).items()
    }
