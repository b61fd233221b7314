"""The chart on a real API server that checks rights: installed, and asked as its own accounts.

There are no controllers: what makes pods of DaemonSets and Deployments is not installed, and pods
are made by the tests.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.cluster import plane
from tests.cluster.binaries import Binaries
from tests.deploy.chart import NAMESPACE, Json, Rendered
from tests.doubles.api_server import node_object, pod_object
from tests.doubles.scheduler import SchedulerConfig
from tests.integration.scheduling_site import ControlPlane

DEADLINE_SECONDS = 60.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
_INSTALLED = (
    *("CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
    *("Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
"""Kinds that do something by themselves, without controllers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server said."""

    status: int
    body: Json

    @property
    def message(self) -> str:
        """Why it refused, empty where it did not."""
        return str(self.body.get("message", "")) if self.status >= 400 else ""


class Cluster:
    """An API server, asked by administrators unless said otherwise."""

    def __init__(self, url: str, folder: Path, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._folder = folder
        self._session = session
        self._paths: dict[tuple[str, str], tuple[str, bool]] = {}

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str = plane.ADMIN_TOKEN,
        kind: str = "application/json",
    ) -> Answer:
        """Send a request, with the token of somebody."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        async with self._session.request(
            method,
            self.url + path,
            data=None if body is None else json.dumps(body),
            headers=headers,
            ssl=False,
        ) as answer:
            return Answer(answer.status, await answer.json(content_type=None))

    async def must(self, method: str, path: str, body: Any = None, **options: Any) -> Json:
        """Send a request that has to be granted; return the answer."""
        answer = await self.ask(method, path, body, **options)
        assert answer.status < 300, f"{method} {path}: {answer.body}"
        return answer.body

    async def path_of(self, value: Json) -> str:
        """Return where an object is, by what the API server says of its kind."""
        version, kind = value["apiVersion"], value["kind"]
        if (version, kind) not in self._paths:
            root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
            for each in (await self.must("GET", root))["resources"]:
                if "/" not in each["name"]:
                    where = f"{root}/{{}}{each['name']}", each["namespaced"]
                    self._paths[version, each["kind"]] = where
        path, namespaced = self._paths[version, kind]
        namespace = value["metadata"].get("namespace", "default")
        return path.format(f"namespaces/{namespace}/" if namespaced else "")

    async def apply(self, value: Json, *, dry_run: bool = False) -> Answer:
        """Apply an object strictly: fields that are not known, or twice there, are refused."""
        path = f"{await self.path_of(value)}/{value['metadata']['name']}"
        query = "fieldManager=tests&fieldValidation=Strict&force=true"
        query += "&dryRun=All" if dry_run else ""
        return await self.ask("PATCH", f"{path}?{query}", value, kind=APPLY)

    async def install(self, rendered: Rendered) -> None:
        """Apply what of a rendering does something here; returns once its kinds are served."""
        for kind in _INSTALLED:
            for each in rendered.kinds(kind):
                answer = await self.apply(each)
                assert answer.status < 300, f"{kind}/{each['metadata']['name']}: {answer.body}"
        statuses = "/apis/nearkv.io/v1alpha1/workerstatuses"
        await until(lambda: self.must("GET", statuses), what="WorkerStatus is served")

    # -- Accounts ------------------------------------------------------------------------

    async def add_namespace(self, name: str, **labels: str) -> None:
        """Add a namespace."""
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels},
        }
        await self.must("POST", "/api/v1/namespaces", namespace)

    async def add_node(self, name: str) -> None:
        """Add a node that is ready."""
        node = node_object(name, labels={"zone": "a"})
        await self.must("POST", "/api/v1/nodes", node)
        status = {"status": node["status"]}
        await self.must("PATCH", f"/api/v1/nodes/{name}/status", status, kind=MERGE)

    async def add_pod(self, name: str, **fields: Any) -> Json:
        """Add a pod that runs, in place of scheduler and kubelet."""
        account = fields.pop("account", "")
        pod = pod_object(name, **fields)
        pod["spec"] |= {"serviceAccountName": account} if account else {}
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"
        made = await self.must("POST", path, pod)
        status = {"status": pod["status"]}
        await self.must("PATCH", f"{path}/{name}/status", status, kind=MERGE)
        return made

    async def token(self, account: str, pod: Json | None = None) -> str:
        """Return a token of an account of the chart, bound to a pod as a mounted one is."""
        spec: Json = {"expirationSeconds": 3600, "audiences": [plane.ISSUER]}
        if pod is not None:
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
        head = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        made = await self.must("POST", path, {**head, "spec": spec})
        return str(made["status"]["token"])

    def kubeconfig(self, name: str, token: str) -> Path:
        """Write a kubeconfig with a token."""
        return plane.write_kubeconfig(self._folder, self.url, name=name, token=token)


async def until(attempt: Callable[[], Awaitable[Any]], *, what: str) -> Any:
    """Repeat what fails by assertion until it does not: rights and policies take a moment."""
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return await attempt()
        except AssertionError as error:
            if time.monotonic() >= give_up_at:
                raise AssertionError(f"never came true: {what}: {error}") from error
            await asyncio.sleep(0.05)


@asynccontextmanager
async def installed(binaries: Binaries, rendered: Rendered) -> AsyncIterator[Cluster]:
    """Run etcd and kube-apiserver with RBAC inside the block, with the chart installed."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nearkv-chart-")))
        url = await plane.start_servers(stack, folder, binaries, authorization="RBAC")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = Cluster(url, folder, session)
        await cluster.add_namespace(NAMESPACE)
        await cluster.install(rendered)
        yield cluster


def scheduling_by_the_chart(
    cluster: Cluster, binaries: Binaries, rendered: Rendered, folder: Path, kubeconfig: Path
) -> ControlPlane:
    """Return a control plane whose scheduler has the chart's configuration and account.

    Only where the extender listens, and that it does so without TLS, comes from the test.
    """
    text = rendered.one("ConfigMap", "nearkv-scheduler")["data"]["scheduler.yaml"]

    @asynccontextmanager
    async def scheduling(config: SchedulerConfig) -> AsyncIterator[None]:
        document = yaml.safe_load(text)
        document["clientConnection"] = {"kubeconfig": str(kubeconfig)}
        (entry,) = document["extenders"]
        entry["urlPrefix"] = config.extenders[0].url_prefix
        # Machines of tests are slower than a cluster's.
        entry["httpTimeout"] = "5s"
        del entry["enableHTTPS"], entry["tlsConfig"]
        async with plane.running_scheduler(folder, binaries, document):
            yield

    headers: Mapping[str, str] = {"Authorization": f"Bearer {plane.ADMIN_TOKEN}"}
    admin = cluster.kubeconfig("admin", plane.ADMIN_TOKEN)
    return ControlPlane(cluster.url, admin, headers, scheduling)
