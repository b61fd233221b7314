"""What is read from a pod."""

import msgspec
import pytest

from nearkv.extender.asking import ask_of
from nearkv.extender.errors import BadRequestError
from nearkv.extender.model import Role
from nearkv.extender.view.pods import PodRules
from nearkv.kube.objects import Pod

OURS = {"nearkv.io/group": "llama", "nearkv.io/role": "decode"}


def pod(labels=None, annotations=None, gpus="2"):
    return msgspec.convert(
        {
            "metadata": {
                "name": "p",
                "namespace": "n",
                "uid": "u",
                "labels": labels,
                "annotations": annotations,
            },
            "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": gpus}}}]},
        },
        Pod,
    )


def ask(*args, **kwargs):
    return ask_of(pod(*args, **kwargs), PodRules(), memory_ratio=0.9)


def test_a_pod_of_ours():
    found, ignored = ask(OURS, {"nearkv.io/gpu-memory-utilization": "0.5", "x": "y"})
    assert (found.namespace, found.name, found.uid) == ("n", "p", "u")
    assert (found.group, found.role, found.devices) == ("llama", Role.DECODE, 2)
    assert (found.memory_ratio, found.prefix_tokens) == (0.5, None)
    assert list(ignored) == []


@pytest.mark.parametrize(
    "labels", [None, {}, {"nearkv.io/role": "decode"}, {"nearkv.io/group": ""}]
)
def test_a_pod_without_a_group_is_not_ours_whatever_it_asks_for(labels):
    found, ignored = ask(labels, {"nearkv.io/prefix-tokens": "x"}, gpus="nonsense")
    assert found.group == ""
    assert list(ignored) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("nearkv.io/gpu-memory-utilization", t) for t in ("", "x", "0", "1.01", "nan", "-1")),
        *(("nearkv.io/prefix-tokens", t) for t in ("", "x", "0", "1.5", "-1", "9" * 30, "\u0663")),
    ],
)
def test_annotations_that_cannot_be_read_are_said_and_change_nothing(name, text):
    found, ignored = ask(OURS, {name: text})
    assert list(ignored) == [name]
    assert (found.memory_ratio, found.prefix_tokens) == (0.9, None)


def test_a_prefix_length():
    assert ask(OURS, {"nearkv.io/prefix-tokens": "8192"})[0].prefix_tokens == 8192


def test_a_quantity_that_is_none_is_refused_by_name():
    with pytest.raises(BadRequestError, match="'nonsense'") as raised:
        ask(OURS, gpus="nonsense")
    assert raised.value.reason == "bad_quantity"
