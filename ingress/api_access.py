"""How the ingress gets at the API server, where settings have it watch something."""

from nearkv.kube.access import ApiAccess


def api_access(kubeconfig: str, api_server: str) -> ApiAccess:
    """Return the access by a URL, else by a kubeconfig, else by the pod's service account."""
    return ApiAccess.plain(api_server) if api_server else ApiAccess.automatic(kubeconfig)
