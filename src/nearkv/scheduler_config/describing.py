"""What kube-scheduler would do with a sound configuration, in sentences (pure)."""

from collections.abc import Iterator, Sequence

from nearkv.scheduler_config.extender_rules import Entry
from nearkv.scheduler_config.reading import Document
from nearkv.scheduler_config.scheduler_rules import profile_names


def describe(document: Document, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield sentences: which pods, which calls, how long they may take, what if they fail."""
    names = " and ".join(profile_names(document))
    # Ignorable extenders are asked after the others.
    for entry in sorted(entries, key=lambda one: one.is_on("ignorable")):
        verbs = [entry.text(key) for key in ("filterVerb", "prioritizeVerb") if entry.text(key)]
        if not verbs:
            continue
        resources = entry.resources
        which = f"that names {' or '.join(resources)}" if resources else "whatever it asks for"
        sent = "node names" if entry.is_on("nodeCacheCapable") else "whole nodes"
        url = entry.text("urlPrefix").rstrip("/")
        calls = " and then ".join(f"POST {url}/{verb}" for verb in verbs)
        yield f"For each pod of {names} {which}: {calls}, with {sent}."
        yield (
            f"A silent extender costs at most {entry.timeout_seconds * len(verbs):g} s a pod, in "
            "which nothing else is scheduled; "
            + (
                "the pod is then placed without it."
                if entry.is_on("ignorable")
                else "a failed filter leaves the pod Pending and is tried again after 1 to 10 s."
            )
        )
        if entry.text("prioritizeVerb"):
            weight = entry.value.get("weight")
            if isinstance(weight, int) and weight > 0:
                yield f"A score of 10 adds {weight * 100} points to a node; plugins add up to 1200."
    if any(entry.resources for entry in entries):
        yield (
            "Pods that get their devices by resource claims (DRA) name no managed resource and "
            "are not sent."
        )
