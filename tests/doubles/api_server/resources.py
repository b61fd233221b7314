"""Resources and the paths they are served at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Resource:
    """A kind of object; ``group`` is empty for the core API."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def base_path(self) -> str:
        """The path of its group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


NODES = Resource("Node", "nodes", is_namespaced=False)
PODS = Resource("Pod", "pods")
WORKER_STATUSES = Resource("WorkerStatus", "workerstatuses", "nearkv.io", "v1alpha1")


@dataclass(frozen=True)
class Target:
    """What a path names: a collection, or with ``name`` an object, perhaps a part of it."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def parse_path(path: str, resources: tuple[Resource, ...]) -> Target | None:
    """Return what a path names, ``None`` for what is not served."""
    for resource in resources:
        if not path.startswith(resource.base_path + "/"):
            continue
        parts = path[len(resource.base_path) + 1 :].split("/")
        namespace = ""
        if resource.is_namespaced and len(parts) > 2 and parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        if parts[0] != resource.plural or len(parts) > 3:
            continue
        name = parts[1] if len(parts) > 1 else ""
        if name and resource.is_namespaced and not namespace:
            return None
        return Target(resource, namespace, name, parts[2] if len(parts) == 3 else "")
    return None
