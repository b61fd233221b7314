"""The scheduler's cache: nodes, pods on them, and pods it assumes there before they are bound."""

from collections.abc import Callable

from tests.doubles.scheduler.events import ClusterEvent, EventKind, node_facets
from tests.doubles.scheduler.go_json import Json
from tests.doubles.scheduler.objects import NodeInfo, PodInfo

Listener = Callable[[ClusterEvent], None]


class Cluster:
    """What the scheduler knows; listeners hear of events, ``waiting`` are pods without a node."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.waiting: dict[str, PodInfo] = {}
        self.bound: dict[str, PodInfo] = {}
        self._assumed: dict[str, str] = {}
        self._homeless: dict[str, dict[str, PodInfo]] = {}
        self._listeners: list[Listener] = []
        self._on_waiting: list[Callable[[PodInfo], None]] = []
        self._on_settled: list[Callable[[str], None]] = []

    def listen(
        self,
        on_event: Listener,
        on_waiting: Callable[[PodInfo], None],
        on_settled: Callable[[str], None],
    ) -> None:
        """Hear of events, of pods that want a node (new or changed), of pods that do not."""
        self._listeners.append(on_event)
        self._on_waiting.append(on_waiting)
        self._on_settled.append(on_settled)

    def set_node(self, document: Json) -> None:
        """Add a node or take its newer version."""
        name = document["metadata"]["name"]
        known = self.nodes.get(name)
        if known is None:
            info = self.nodes[name] = NodeInfo(document)
            for pod in self._homeless.pop(name, {}).values():
                info.add(pod)
            self._tell(ClusterEvent(EventKind.NODE_ADDED))
            return
        facets = node_facets(known.document, document)
        known.replace(document)
        if facets:
            self._tell(ClusterEvent(EventKind.NODE_CHANGED, facets))

    def delete_node(self, name: str) -> None:
        """Take a node away; its pods stay known."""
        info = self.nodes.pop(name, None)
        if info is not None:
            self._homeless[name] = info.pods
            self._tell(ClusterEvent(EventKind.NODE_DELETED))

    def set_pod(self, document: Json) -> None:
        """Add a pod or take its newer version."""
        pod = PodInfo(document)
        if pod.is_finished:
            self.delete_pod(pod.uid)
        elif pod.node_name:
            self._set_bound(pod)
        else:
            self._set_waiting(pod)

    def delete_pod(self, uid: str) -> None:
        """Take a pod away."""
        self._assumed.pop(uid, None)
        self.waiting.pop(uid, None)
        for settled in self._on_settled:
            settled(uid)
        pod = self.bound.pop(uid, None)
        if pod is not None:
            self._leave(pod.node_name, uid)
            self._tell(ClusterEvent(EventKind.POD_GONE, pod_uid=uid))

    def assume(self, pod: PodInfo, node: str) -> None:
        """Count a pod on a node before it is bound there."""
        self._assumed[pod.uid] = node
        self._join(node, pod)

    def forget(self, uid: str) -> None:
        """Undo :meth:`assume`."""
        node = self._assumed.pop(uid, None)
        if node is not None:
            self._leave(node, uid)

    def is_assumed(self, uid: str) -> bool:
        """Tell whether a pod is on its way to a node."""
        return uid in self._assumed

    def _set_bound(self, pod: PodInfo) -> None:
        assumed = self._assumed.pop(pod.uid, None)
        if assumed is not None:
            self._leave(assumed, pod.uid)
        known = self.bound.get(pod.uid)
        self.waiting.pop(pod.uid, None)
        for settled in self._on_settled:
            settled(pod.uid)
        self.bound[pod.uid] = pod
        self._join(pod.node_name, pod)
        if known is None:
            self._tell(ClusterEvent(EventKind.POD_BOUND, pod_uid=pod.uid))
        elif known.without_status() != pod.without_status():
            self._tell(ClusterEvent(EventKind.ASSIGNED_POD_CHANGED, pod_uid=pod.uid))

    def _set_waiting(self, pod: PodInfo) -> None:
        if self.is_assumed(pod.uid) or pod.is_terminating:
            return
        known = self.waiting.get(pod.uid)
        self.waiting[pod.uid] = pod
        for wants in self._on_waiting:
            wants(pod)
        if known is not None and known.without_status() != pod.without_status():
            self._tell(ClusterEvent(EventKind.WAITING_POD_CHANGED, pod_uid=pod.uid))

    def _join(self, node: str, pod: PodInfo) -> None:
        info = self.nodes.get(node)
        if info is None:
            self._homeless.setdefault(node, {})[pod.uid] = pod
        else:
            info.add(pod)

    def _leave(self, node: str, uid: str) -> None:
        info = self.nodes.get(node)
        if info is None:
            self._homeless.get(node, {}).pop(uid, None)
        else:
            info.remove(uid)

    def _tell(self, event: ClusterEvent) -> None:
        for listener in self._listeners:
            listener(event)
