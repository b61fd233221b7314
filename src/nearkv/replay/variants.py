"""From ``--policy``, ``--config`` and ``--set`` to the variants to try (pure but for the file)."""

from collections.abc import Mapping, Sequence
from itertools import product

from nearkv.errors import SettingsError
from nearkv.ingress.settings import IngressSettings
from nearkv.replay.errors import ReplayError
from nearkv.replay.peers import PEERS
from nearkv.replay.running import OWN_POLICIES, Variant
from nearkv.settings.resolving import resolve_settings

_MOST_VARIANTS = 200


def list_variants(
    policies: Sequence[str], sets: Sequence[str], *, config: str | None = None
) -> list[Variant]:
    """Return one variant for each policy and, for our own ones, each combination of ``sets``.

    A set is ``key=value`` or ``key=value,value...`` in the names of the ingress's settings.
    Raises :class:`ReplayError` naming the option at fault.
    """
    choices = [_parse_set(text) for text in sets]
    variants = []
    for policy in policies:
        if policy in PEERS:
            variants.append(Variant(policy, policy, _settings({}, "cost", config)))
        elif policy in OWN_POLICIES:
            variants += [
                Variant(_label(policy, values, choices), policy, _settings(values, policy, config))
                for values in _combinations(choices)
            ]
        else:
            known = ", ".join([*OWN_POLICIES, *PEERS])
            raise ReplayError(f"--policy: {policy!r} is none of {known}")
    if not variants:
        raise ReplayError("--policy: name at least one")
    if len(variants) > _MOST_VARIANTS:
        raise ReplayError(f"--set: {len(variants)} combinations, {_MOST_VARIANTS} at most")
    return variants


def _parse_set(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not key.strip() or not listed:
        raise ReplayError(f"--set: expected key=value[,value...], got {text!r}")
    return key.strip(), listed


def _combinations(choices: Sequence[tuple[str, list[str]]]) -> list[dict[str, str]]:
    keys = [key for key, _ in choices]
    return [dict(zip(keys, values, strict=True)) for values in product(*(v for _, v in choices))]


def _label(policy: str, values: Mapping[str, str], choices: Sequence[tuple[str, list[str]]]) -> str:
    """Name a variant by its policy and by what differs between its kind."""
    varied = [key for key, listed in choices if len(listed) > 1]
    return " ".join([policy, *(f"{key.rpartition('.')[2]}={values[key]}" for key in varied)])


def _settings(values: Mapping[str, str], policy: str, config: str | None) -> IngressSettings:
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    try:
        resolved = resolve_settings(
            IngressSettings,
            [f"--policy={policy}", *arguments],
            environment={},
            component="ingress",
            config_path=config,
        )
    except SettingsError as error:
        raise ReplayError(f"--set or --config: {'; '.join(error.problems)}") from error
    return resolved.settings
