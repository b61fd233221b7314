"""The chart, through Helm's own engine; the one place that knows ``helm_python``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "nearkv"
RELEASE = NAMESPACE = "nearkv"
_SECRET = re.compile(
    r"^( +(?:[a-z-]+-token|cluster-secret|ca\.crt|tls\.crt|tls\.key)): .*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What the chart makes of some values: texts by template, all objects, and the notes."""

    texts: Mapping[str, str]
    objects: Sequence[Json]
    notes: str

    def one(self, kind: str, name: str) -> Json:
        """Return an object; raises ``LookupError`` unless there is exactly one."""
        found = [
            each
            for each in self.objects
            if each["kind"] == kind and each["metadata"]["name"] == name
        ]
        if len(found) != 1:
            raise LookupError(f"{len(found)} of {kind}/{name}")
        return found[0]

    def kinds(self, *kinds: str) -> list[Json]:
        """Return the objects of some kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def as_text(self) -> str:
        """Return one readable file; what is random in each rendering is masked."""
        parts = [f"# {path}\n{text.strip()}\n" for path, text in self.texts.items()]
        return _SECRET.sub(r"\1: <random>", "---\n".join(parts))


class ChartError(Exception):
    """The chart refused values; the text is Helm's."""


def profile_names() -> list[str]:
    """Return the names of the values files that stand for a kind of cluster."""
    return sorted(path.name.removesuffix("-values.yaml") for path in CHART.glob("ci/*-values.yaml"))


def profile(name: str) -> Json:
    """Return the values of a profile."""
    text = (CHART / "ci" / f"{name}-values.yaml").read_text(encoding="utf-8")
    values: Json = yaml.safe_load(text)
    return values


def render(values: Json) -> Rendered:
    """Render the chart; raises :class:`ChartError`."""
    try:
        with helm_python.Chart.load(CHART) as chart:
            made = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    except helm_python.HelmError as error:
        raise ChartError(str(error)) from error
    notes = next((text for path, text in made.items() if path.endswith("NOTES.txt")), "")
    texts, objects = {}, []
    for path, text in sorted(made.items()):
        if path.endswith(".yaml") and (found := read_yaml(text)):
            texts[path] = text
            objects += found
    return Rendered(texts, objects, notes)


def read_yaml(text: str) -> list[Json]:
    """Return the documents of a text that are not empty, by libyaml: there is much to read."""
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def lint(values: Json) -> list[str]:
    """Return what ``helm lint --strict`` has to say, save for hints."""
    report = helm_python.lint(CHART, values, strict=True)
    found: list[str] = [each["error"] for each in report["messages"] if each["severity"] > 1]
    return [*found, *report["errors"]]


def pods_of(rendered: Rendered) -> dict[str, Json]:
    """Return the pod specs by the kind and name of what makes them."""
    pods = {}
    for each in rendered.objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "Pod":
            pods[name] = each["spec"]
        elif each["kind"] in {"Deployment", "DaemonSet", "StatefulSet", "Job"}:
            pods[name] = each["spec"]["template"]["spec"]
    return pods


def containers_of(pod: Json) -> list[Json]:
    """Return all containers of a pod spec."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def settings_of(rendered: Rendered, component: str) -> Json:
    """Return the settings file of a component."""
    data = rendered.one("ConfigMap", f"nearkv-{component}")["data"]
    settings: Json = yaml.safe_load(data[f"{component}.yaml"])
    return settings
