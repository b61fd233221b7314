"""The CRD, its rules and the agent's rights on a real kube-apiserver; skipped where there is none.

``KUBE_BIN_DIR`` names the folder with etcd and kube-apiserver, as for ``make test-cluster``.
"""

import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, repeat
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from nearkv.agent.worker_status.composing import MAX_OBJECT_BYTES, compose, fit
from nearkv.kube.access import ApiAccess
from nearkv.kube.errors import PatchError
from nearkv.kube.patching import Patcher
from tests.agent.worker_status.things import (
    crd,
    devices,
    documented_role,
    facts,
    node_facts,
    paths,
    report,
)
from tests.cluster import plane
from tests.cluster.binaries import VARIABLE, find_binaries

pytestmark = [
    pytest.mark.skipif(not find_binaries().usable, reason=f"{VARIABLE} has no binaries"),
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]
STATUSES = "/apis/nearkv.io/v1alpha1/namespaces/default/workerstatuses"
LONGEST = "n" * 253


class Server:
    """A kube-apiserver: as admin by :meth:`ask`, as the agent by ``patcher``."""

    def __init__(self, url, session, folder):
        self.url = url
        self.session = session
        kubeconfig = json.loads(plane.write_kubeconfig(folder, url).read_text())
        kubeconfig["users"][0]["user"]["token"] = "agent"  # noqa: S105 (of this test)
        self.kubeconfig = folder / "agent.json"
        self.kubeconfig.write_text(json.dumps(kubeconfig))
        self.patcher = None

    async def ask(self, method, path, body=None, *, expected=(200, 201)):
        headers = {"Authorization": f"Bearer {plane.ADMIN_TOKEN}"}
        async with self.session.request(
            method, self.url + path, json=body, headers=headers, ssl=False
        ) as answer:
            text = await answer.text()
            assert answer.status in expected, text
            return json.loads(text)

    async def make(self, kind, path, name, **fields):
        group, _, version = path.removeprefix("/apis/").partition("/")
        head = {"apiVersion": f"{group}/{version.partition('/')[0]}", "kind": kind}
        return await self.ask("POST", path, {**head, "metadata": {"name": name}, **fields})

    async def apply(self, name, *, status=None, owner=None):
        """Apply as the agent does; return the object."""
        head = {"apiVersion": "nearkv.io/v1alpha1", "kind": "WorkerStatus"}
        metadata = {"name": name, "namespace": "default"}
        if owner is not None:
            reference = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": owner}
            metadata["ownerReferences"] = [reference]
        path = f"{STATUSES}/{name}" + ("" if status is None else "/status")
        body = {**head, "metadata": metadata, **({} if status is None else {"status": status})}
        return json.loads(await self.patcher.apply(path, body, field_manager="nearkv-agent"))


async def until(attempt):
    """Try until it works; raises what the last attempt did when the time is up."""
    give_up_at = time.monotonic() + 30.0
    while True:
        try:
            return await attempt()
        except (PatchError, pytest.fail.Exception):
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.05)


@asynccontextmanager
async def api_server():
    binaries = find_binaries()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nearkv-crd-")))
        etcd = await plane._start_etcd(stack, folder, binaries)
        (port,) = plane._free_ports(1)
        tokens = folder / "tokens.csv"
        tokens.write_text(f'{plane.ADMIN_TOKEN},admin,admin,"system:masters"\nagent,agent,agent\n')
        key = folder / "key"
        await plane._make_key(key)
        program = await plane._start(
            stack,
            folder,
            binaries.path("kube-apiserver"),
            *("--etcd-servers", etcd, "--bind-address", "127.0.0.1", "--secure-port", str(port)),
            *("--cert-dir", str(folder / "certificates"), "--token-auth-file", str(tokens)),
            *("--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.0.0.0/24"),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-signing-key-file", str(key)),
            *("--service-account-key-file", str(key)),
            *("--enable-admission-plugins", "OwnerReferencesPermissionEnforcement"),
            *("--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition"),
        )
        url = f"https://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {plane.ADMIN_TOKEN}"}
        await plane._ready(program, f"{url}/api/v1/namespaces/default", headers)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        server = Server(url, session, folder)
        access = ApiAccess.automatic(str(server.kubeconfig))
        server.patcher = Patcher(await stack.enter_async_context(access))
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with api_server() as server:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await server.ask("POST", f"{definitions}?fieldValidation=Strict", crd())
        role = documented_role()
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        await server.make("ClusterRole", f"{rbac}/clusterroles", "agent", rules=role["rules"])
        await server.make(
            "ClusterRoleBinding",
            f"{rbac}/clusterrolebindings",
            "agent",
            roleRef={"apiGroup": rbac.split("/")[2], "kind": "ClusterRole", "name": "agent"},
            subjects=[{"apiGroup": rbac.split("/")[2], "kind": "User", "name": "agent"}],
        )
        # Served a moment after it was accepted.
        await until(lambda: server.apply("first", owner="u"))
        yield server


async def test_what_the_agent_writes_is_kept_whole_and_small(server):
    for name, fields in {
        "decode-7f9c4b5d8-x2x4q": {"node_facts": node_facts(), "prefixes": ("a", "b")},
        LONGEST: {
            "engine": facts(ranks=4, group=LONGEST, model=LONGEST, version="v" * 64),
            "node_facts": node_facts(devices=devices(16), paths=paths(8)),
            "prefixes": tuple("x" * 60 + f"{number:04}" for number in range(16)),
            "prefix_count": 16,
        },
    }.items():
        introduced = await server.apply(name, owner="0f7e8a3c-6f0b-4a53-9d0c-2f3e7c1d9a10")
        assert "status" not in introduced
        status = fit(compose(report(**fields)), name=name)
        stored = await server.apply(name, status=status)
        assert stored["status"] == json.loads(msgspec.json.encode(status))
        assert len(json.dumps(stored, separators=(",", ":"))) <= MAX_OBJECT_BYTES


async def test_the_same_again_changes_nothing(server):
    first = await server.apply("again", owner="u")
    assert await server.apply("again", owner="u") == first
    status = compose(report())
    once = await server.apply("again", status=status)
    assert await server.apply("again", status=status) == once
    # Nor does introducing it once more take the status away.
    assert (await server.apply("again", owner="u"))["status"] == once["status"]


def broken(**fields):
    status = json.loads(msgspec.json.encode(compose(report())))
    return {**status, **fields}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kvCacheUsedBytes": 1 << 40}, "kvCacheUsedBytes needs kvCacheTotalBytes"),
        ({"kvCacheUsedPercent": 101}, "kvCacheUsedPercent"),
        ({"role": "judge"}, "role"),
        ({"node": ""}, "node"),
        ({"observedAt": "yesterday"}, "observedAt"),
        ({"conditions": broken()["conditions"][1:]}, "each of the five conditions"),
        ({"conditions": broken()["conditions"] + broken()["conditions"][:1]}, "there twice"),
        ({"cachedPrefixes": ["x" * 65]}, "cachedPrefixes"),
    ],
)
async def test_what_makes_no_sense_is_refused(server, fields, said):
    await server.apply("broken", owner="u")
    with pytest.raises(PatchError, match=said):
        await server.apply("broken", status=broken(**fields))


async def test_an_object_of_an_earlier_pod_is_left_to_the_garbage_collector(server):
    await server.apply("stays", owner="old")
    with pytest.raises(PatchError, match="ownerRef") as refused:
        await server.apply("stays", owner="new")
    assert refused.value.trouble == "forbidden"


def rules_without(rules, verb, resource):
    """Return rules that grant all but one verb on one resource."""
    left = []
    for rule in rules:
        named = [each for each in rule["resources"] if each != resource]
        left.append({**rule, "resources": named})
        if len(named) < len(rule["resources"]):
            verbs = [each for each in rule["verbs"] if each != verb]
            left.append({**rule, "resources": [resource], "verbs": verbs})
    return [rule for rule in left if rule["resources"] and rule["verbs"]]


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("create", "workerstatuses"), ("patch", "workerstatuses"), ("patch", "workerstatuses/status")],
)
async def test_no_right_can_be_spared(server, verb, resource):
    status = compose(report()) if resource.endswith("/status") else None
    # What was made may be patched without the right to make it: another name each time.
    numbers = count() if verb == "create" else repeat(0)
    owner = None if status else "u"
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/agent"
    granted = documented_role()["rules"]
    if verb == "patch":
        await server.apply("spared-0", owner="u")

    async def attempt():
        await server.apply(f"spared-{next(numbers)}", owner=owner, status=status)

    async def is_forbidden():
        # Rights are read from a cache, which is a moment behind.
        with pytest.raises(PatchError, match="forbidden"):
            await attempt()

    async def grant(rules):
        current = await server.ask("GET", role)
        await server.ask("PUT", role, {**current, "rules": rules})

    await grant(rules_without(granted, verb, resource))
    try:
        await until(is_forbidden)
    finally:
        await grant(granted)
    await until(attempt)


async def test_columns_are_shown(server):
    await server.apply("shown", owner="u")
    await server.apply("shown", status=compose(report()))
    headers = {
        "Authorization": f"Bearer {plane.ADMIN_TOKEN}",
        "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io",
    }
    url = f"{server.url}{STATUSES}/shown"
    async with server.session.get(url, headers=headers, ssl=False) as answer:
        table = await answer.json()
    names = [column["name"] for column in table["columnDefinitions"]]
    row = dict(zip(names, table["rows"][0]["cells"], strict=True))
    assert (row["Ready"], row["Reason"], row["Role"]) == ("True", "Serving", "decode")
    assert (row["KV-Used"], row["Queue"], row["Node"]) == (40, 1, "gpu-1")
    assert row["Parity"] == row["Transfer"] == "True"
