"""The engines among the pods of a node, and what each change of a pod means for them (pure).

An engine stays as it was known while its pod cannot be read: an annotation that was spoilt, or
an address that went before the pod did, is no reason to forget a cache.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from nearkv.agent.kubernetes.pod_engines import (
    PodEngine,
    PodRules,
    PodUnreadableError,
    is_engine,
    is_running,
    read_engine,
)
from nearkv.kube.objects import Pod

MAX_ENGINES = 256
"""Pods that are followed at once; a kubelet runs 110 unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of one engine; ``None`` before is a new one, ``None`` after one that is gone."""

    before: PodEngine | None
    after: PodEngine | None


class PodRoster:
    """Pods of a node by UID. Engines named ``taken`` are followed by somebody else already."""

    def __init__(self, rules: PodRules, *, node: str, taken: Collection[str] = ()) -> None:
        self._rules = rules
        self._node = node
        self._taken = frozenset(taken)
        self._names: dict[str, tuple[str, str]] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self.engines: dict[str, PodEngine] = {}
        self.waiting: dict[str, str] = {}
        """Pods of engines that do not run yet, by UID."""
        self.problems: dict[str, str] = {}
        """What cannot be read of pods, by UID."""

    def uid_of(self, namespace: str, name: str) -> str | None:
        """Return the UID of a pod of this node."""
        return self._uids.get((namespace, name))

    def pod_of(self, uid: str) -> str:
        """Return a pod as people name it."""
        return "/".join(self._names.get(uid, ("", uid)))

    def replace(self, pods: Iterable[Pod]) -> list[Step]:
        """Take a complete list: pods that are not in it are gone."""
        listed = {pod.uid: pod for pod in pods}
        steps = [step for uid in set(self._names) - set(listed) for step in self._forget(uid)]
        for pod in listed.values():
            steps += self.put(pod)
        return steps

    def put(self, pod: Pod) -> list[Step]:
        """Take a pod that is new or has changed."""
        if pod.node_name != self._node:
            return list(self._forget(pod.uid))
        self._names[pod.uid] = (pod.namespace, pod.name)
        self._uids[pod.namespace, pod.name] = pod.uid
        before = self.engines.get(pod.uid)
        after = self._read(pod, before)
        if after is None:
            self.engines.pop(pod.uid, None)
        else:
            self.engines[pod.uid] = after
        return [] if before == after else [Step(before, after)]

    def drop(self, pod: Pod) -> list[Step]:
        """Take it that a pod is gone."""
        return list(self._forget(pod.uid))

    def _read(self, pod: Pod, before: PodEngine | None) -> PodEngine | None:
        self.problems.pop(pod.uid, None)
        self.waiting.pop(pod.uid, None)
        if pod.uid in self._taken or pod.has_ended or not is_engine(pod, self._rules):
            return None
        if before is None and not is_running(pod):
            self.waiting[pod.uid] = pod.phase
            return None
        if before is None and len(self.engines) >= MAX_ENGINES:
            self.problems[pod.uid] = f"not followed: the limit is {MAX_ENGINES} engines"
            return None
        try:
            if is_running(pod):
                return read_engine(pod, self._rules)
        except PodUnreadableError as error:
            self.problems[pod.uid] = str(error)
        if before is None:
            return None
        return replace(before, is_ready=pod.is_ready, is_leaving=pod.is_terminating)

    def _forget(self, uid: str) -> Iterator[Step]:
        name = self._names.pop(uid, None)
        # A pod of the same name may have come in its place.
        if name is not None and self._uids.get(name) == uid:
            del self._uids[name]
        self.problems.pop(uid, None)
        self.waiting.pop(uid, None)
        before = self.engines.pop(uid, None)
        if before is not None:
            yield Step(before, None)
