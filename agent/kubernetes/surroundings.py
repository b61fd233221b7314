"""What an agent's own pod says of itself: the Downward API, and whether there is a cluster."""

from collections.abc import Mapping
from pathlib import Path

from nearkv.agent.settings import AgentSettings

NODE_NAME = "NODE_NAME"
"""The variable that the DaemonSet fills with ``spec.nodeName``."""

_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def complete_settings(
    settings: AgentSettings,
    environment: Mapping[str, str],
    *,
    token_file: Path = _SERVICE_ACCOUNT_TOKEN,
) -> AgentSettings:
    """Return the settings with the node's name, and with ``kubernetes.enabled`` decided.

    A node that the settings name wins over the variable. A service account alone is no reason to
    look for pods: many programs run in pods, and only our DaemonSet says which node it is on.
    """
    changes: dict[str, object] = {}
    node = environment.get(NODE_NAME, "")
    if node and "node" not in settings.model_fields_set:
        changes["node"] = node
    kubernetes = settings.kubernetes
    if kubernetes.enabled == "auto":
        found = kubernetes.kubeconfig is not None or (bool(node) and token_file.exists())
        enabled = "on" if found else "off"
        changes["kubernetes"] = kubernetes.model_copy(update={"enabled": enabled})
    return settings.model_copy(update=changes)
