"""What the agents' admission policies let through, by an evaluator of their language (CEL).

It is not the API server's own, which also checks types and cost; the operators used are those of
the language's core.
"""

import copy

import cel
import pytest

ROOM = "nearkv.io/room-changed-at"
AGENT = "system:serviceaccount:nearkv:nearkv-agent"
CLAIM = "authentication.kubernetes.io/node-name"
NODE = {
    "metadata": {"name": "n1", "labels": {"zone": "a"}, "annotations": {"other": "1"}},
    "spec": {"taints": [{"key": "gpu"}]},
}
STATUS = {"metadata": {"name": "engine"}, "status": {"node": "n1"}}


def decide(rendered, name, *, before, after, node="n1", user=AGENT, subresource=""):
    """Return the first message of a policy, empty where it lets the request through."""
    spec = rendered("default").one("ValidatingAdmissionPolicy", f"nearkv-{name}")["spec"]
    extra = {CLAIM: [node]} if node else {}
    request = {"userInfo": {"username": user, "extra": extra}}
    if subresource:  # an API server leaves it out otherwise
        request["subResource"] = subresource
    context = {
        "request": request,
        "object": after,
        "oldObject": before,
        "variables": {},
    }
    if not all(cel.evaluate(each["expression"], context) for each in spec["matchConditions"]):
        return ""
    for each in spec["variables"]:
        context["variables"][each["name"]] = cel.evaluate(each["expression"], context)
    for each in spec["validations"]:
        if cel.evaluate(each["expression"], context) is not True:
            return each["message"]
    return ""


def changed(value, path, new):
    """Return a copy with one part set, or removed with None."""
    made = copy.deepcopy(value)
    *parents, last = path
    inner = made
    for part in parents:
        inner = inner.setdefault(part, {})
    if new is None:
        inner.pop(last)
    else:
        inner[last] = new
    return made


def on_node(rendered, path, new, *, before=NODE, **request):
    """Decide about a change of a Node."""
    after = changed(before, path, new)
    return decide(rendered, "agent-own-node", before=before, after=after, **request)


def test_an_agent_may_say_that_there_is_room(rendered):
    assert on_node(rendered, ("metadata", "annotations", ROOM), "2026") == ""
    told = changed(NODE, ("metadata", "annotations", ROOM), "2026")
    assert on_node(rendered, ("metadata", "annotations", ROOM), "2027", before=told) == ""
    bare = {"metadata": {"name": "n1"}, "spec": {}}
    assert on_node(rendered, ("metadata", "annotations", ROOM), "2026", before=bare) == ""


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (("metadata", "annotations", "other"), "2", "no annotation of its Node but"),
        (("metadata", "annotations", "new"), "2", "no annotation of its Node but"),
        (("metadata", "annotations", "other"), None, "no annotation of its Node but"),
        (("metadata", "annotations"), None, "no annotation of its Node but"),
        (("metadata", "labels", "zone"), "b", "may not change labels"),
        (("metadata", "labels"), None, "may not change labels"),
        (("metadata", "finalizers"), ["x"], "may not change finalizers"),
        (("metadata", "ownerReferences"), [{"uid": "x"}], "may not change ownerReferences"),
        (("spec", "taints"), [], "neither spec nor status"),
        (("spec", "unschedulable"), True, "neither spec nor status"),
    ],
)
def test_it_may_change_nothing_else(rendered, path, new, message):
    assert message in on_node(rendered, path, new)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"node": "n2"}, "its own Node only"),
        ({"node": ""}, "its own Node only"),
        ({"subresource": "status"}, "neither spec nor status"),
    ],
)
def test_it_may_do_so_on_its_own_node_only(rendered, request_, message):
    found = on_node(rendered, ("metadata", "annotations", ROOM), "2026", **request_)
    assert message in found


def test_others_are_left_alone(rendered):
    kubelet = "system:node:n2"
    assert on_node(rendered, ("spec", "taints"), [], user=kubelet, node="") == ""


@pytest.mark.parametrize(
    ("after", "node", "message"),
    [
        (STATUS, "n1", ""),
        ({"metadata": {"name": "engine"}}, "n1", ""),
        (STATUS, "n2", "its own node only"),
        (STATUS, "", "its own node only"),
    ],
)
def test_it_reports_on_its_own_node_only(rendered, after, node, message):
    found = decide(rendered, "agent-own-status", before=None, after=after, node=node)
    assert (message in found) if message else found == ""
