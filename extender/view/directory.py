"""Where the agents are: found by their pods, by their hosts' addresses, or configured (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass

from nearkv.extender.view.collecting import AgentTarget
from nearkv.extender.view.nodes import NodeFacts
from nearkv.kube.objects import Pod
from nearkv.settings.address import Address

_HOST_IP = "{host_ip}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDiscovery:
    """How agents are found; the first that is set counts.

    - ``urls``: as configured; each speaks for the node that it names.
    - ``selector``: label selector of their pods in ``namespace``, serving on ``port``.
    - ``template``: a URL in which ``{host_ip}`` stands for each node's address.
    """

    urls: tuple[str, ...] = ()
    selector: str = ""
    namespace: str = ""
    port: int = 9470
    scheme: str = "http"
    template: str = ""

    @property
    def by_pods(self) -> bool:
        """Whether agents are found by their pods."""
        return bool(self.selector) and not self.urls

    @property
    def by_nodes(self) -> bool:
        """Whether agents are found by the addresses of nodes."""
        return bool(self.template) and not self.urls and not self.selector


@dataclass(frozen=True, slots=True)
class SeenAgent:
    """An agent's pod; ``address`` is empty while it cannot be asked."""

    uid: str
    node: str
    address: str


def read_agent(pod: Pod) -> SeenAgent:
    """Return what is kept of an agent's pod."""
    can_be_asked = pod.phase == "Running" and not pod.is_terminating
    return SeenAgent(pod.uid, pod.node_name, (pod.status.pod_ip or "") if can_be_asked else "")


class AgentDirectory:
    """Keeps the agents' addresses."""

    def __init__(self, discovery: AgentDiscovery) -> None:
        self._discovery = discovery
        self._agents: dict[str, SeenAgent] = {}
        self.changed = True

    def replace(self, agents: Iterable[SeenAgent]) -> None:
        """Take a complete list of the agents' pods."""
        self._agents = {agent.uid: agent for agent in agents}
        self.changed = True

    def put(self, agent: SeenAgent) -> None:
        """Take an agent's pod that is new or has changed."""
        self.changed |= self._agents.get(agent.uid) != agent
        self._agents[agent.uid] = agent

    def drop(self, uid: str) -> None:
        """Take note that an agent's pod is gone."""
        self.changed |= self._agents.pop(uid, None) is not None

    def targets(self, nodes: Iterable[NodeFacts]) -> list[AgentTarget]:
        """Return the agents to follow, by what is known now."""
        self.changed = False
        discovery = self._discovery
        if discovery.urls:
            return [AgentTarget(url) for url in discovery.urls]
        if discovery.by_pods:
            return [
                AgentTarget(self._url(agent.address), agent.node)
                for agent in self._agents.values()
                if agent.address and agent.node
            ]
        if discovery.by_nodes:
            return [
                AgentTarget(
                    discovery.template.replace(_HOST_IP, _bracketed(node.host_ip)), node.name
                )
                for node in nodes
                if node.host_ip
            ]
        return []

    def _url(self, address: str) -> str:
        return f"{self._discovery.scheme}://{Address(address, self._discovery.port)}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
