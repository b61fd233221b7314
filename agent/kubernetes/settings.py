"""Settings of the kubernetes group; see docs/configuration.md for the generated table."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from nearkv.settings import Secret, SettingsGroup


def _name_switch(value: object) -> object:
    """Return the word for what YAML takes for a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_name_switch)]
"""On, off, or decided by what is there; YAML reads ``on`` and ``off`` as truth values."""


class KubernetesSettings(SettingsGroup):
    """Finding the engines of this node as pods."""

    enabled: Switch = Field(
        "auto",
        description="Find engines as pods of this node. auto: where `kubeconfig` is set, or a "
        "service account is mounted and the variable NODE_NAME is there.",
    )
    kubeconfig: Path | None = Field(
        None, description="Kubeconfig; default: the pod's service account, then KUBECONFIG."
    )
    context: str | None = Field(None, description="Context of the kubeconfig; default: its own.")
    namespace: str = Field("", description="Namespace to look in; empty looks in all.")
    selector: str = Field(
        "",
        description="Label selector of engines' pods; default: those with one of `group_labels` "
        "or `role_labels`.",
    )
    group_labels: tuple[str, ...] = Field(
        ("nearkv.io/group",),
        description="Pod labels that name the group; the first that a pod has counts.",
    )
    role_labels: tuple[str, ...] = Field(
        ("nearkv.io/role", "llm-d.ai/role"),
        description="Pod labels that name the role: prefill, decode; anything else is both.",
    )
    port: int = Field(
        8000,
        gt=0,
        lt=1 << 16,
        description="HTTP port of engines whose pod has no annotation nearkv.io/port.",
    )
    api_key: Secret | None = Field(
        None, description="Bearer token that the engines want; the same for all pods."
    )

    @property
    def is_on(self) -> bool:
        """Whether pods are followed; what the environment says of ``auto`` is decided before."""
        return self.enabled == "on" or (self.enabled == "auto" and self.kubeconfig is not None)
