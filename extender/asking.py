"""What a pod asks for, read from the pod itself (pure).

Group and role are labels, since watches select by them; what only this extender reads are
annotations. An annotation that cannot be read is passed over, and said: a typing error must not
keep a pod from being placed.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from nearkv.extender.errors import BadRequestError
from nearkv.extender.model import PodAsk
from nearkv.extender.view.pods import PodRules, read_group, read_role
from nearkv.kube.objects import Pod, requested_devices

MEMORY_RATIO_ANNOTATION = "nearkv.io/gpu-memory-utilization"
PREFIX_TOKENS_ANNOTATION = "nearkv.io/prefix-tokens"

_MOST_PREFIX_TOKENS = 100_000_000
_MOST_DEVICES = 1 << 20
T = TypeVar("T")


def ask_of(pod: Pod, rules: PodRules, *, memory_ratio: float) -> tuple[PodAsk, Sequence[str]]:
    """Return what a pod asks for, and the annotations that could not be read.

    ``memory_ratio`` holds where the pod does not say. Raises :class:`BadRequestError` where a
    container asks for what is no quantity.
    """
    labels = pod.labels
    group = read_group(labels, rules.group_labels)
    ask = PodAsk(namespace=pod.namespace, name=pod.name, uid=pod.uid, memory_ratio=memory_ratio)
    if not group:
        return ask, ()
    ignored: list[str] = []
    said_ratio = _read(pod, MEMORY_RATIO_ANNOTATION, _ratio, ignored)
    return PodAsk(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        group=group,
        role=read_role(labels, rules.role_labels),
        devices=_devices(pod, rules),
        memory_ratio=memory_ratio if said_ratio is None else said_ratio,
        prefix_tokens=_read(pod, PREFIX_TOKENS_ANNOTATION, _tokens, ignored),
    ), ignored


def _devices(pod: Pod, rules: PodRules) -> int:
    try:
        return min(requested_devices(pod, rules.resources), _MOST_DEVICES)
    except ValueError as error:
        raise BadRequestError(
            f"Pod: a container's resources: {error}", reason="bad_quantity"
        ) from error


def _read(pod: Pod, name: str, parse: Callable[[str], T], ignored: list[str]) -> T | None:
    text = pod.annotations.get(name)
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError:
        ignored.append(name)
        return None


def _ratio(text: str) -> float:
    ratio = float(text)
    if not 0 < ratio <= 1:
        raise ValueError(text)
    return ratio


def _tokens(text: str) -> int:
    tokens = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < tokens <= _MOST_PREFIX_TOKENS:
        raise ValueError(text)
    return tokens
