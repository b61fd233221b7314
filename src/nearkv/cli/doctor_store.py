"""Does the shared store work, where the agent's settings name one, and where agents use one."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nearkv.cli.components import settings_class_of
from nearkv.cli.doctor_checks import Finding, Verdict
from nearkv.cli.fetching import Answer
from nearkv.errors import SettingsError
from nearkv.settings import resolve_settings, secret_bytes
from nearkv.transfer.backends.contract import Stop, monotonic_ms
from nearkv.transfer.errors import Reason, TransferError
from nearkv.transfer.store.opening import FILES, StoreOptions, shown_url, tier_of, try_store

STORE_SECONDS = 5.0
_HANGING_SECONDS = 5.0
_CHECK = "store"
_CONFIG_VARIABLE = "NEARKV_AGENT_CONFIG"
_STORE_VARIABLES = "NEARKV_AGENT_TRANSFER__STORE"
_ADVICE = {
    FILES: "the folder must belong to the agent's user, let nobody else write, and support flock; "
    "run this as that user",
    "redis": "look at the address, the password, and whether redis-server runs",
}


def check_store(
    config: Path | None, environment: Mapping[str, str], *, seconds: float = STORE_SECONDS
) -> list[Finding]:
    """Put a small value into the store that the agent's settings name, and read it again.

    Returns nothing where no settings are given, or they name no store.
    """
    if config is None and not any(
        name == _CONFIG_VARIABLE or name.startswith(_STORE_VARIABLES) for name in environment
    ):
        return []
    try:
        options = _read_options(config, environment)
    except SettingsError as error:
        return [Finding(check=_CHECK, verdict=Verdict.FAIL, finding=f"agent's settings: {error}")]
    return [] if options is None else [_judge(options, seconds)]


def judge_stores(answers: Sequence[Answer]) -> list[Finding]:
    """Return what agents say of the stores that they use."""
    rows = []
    for answer in answers:
        transfer = (answer.document or {}).get("transfer")
        store = transfer.get("store") if isinstance(transfer, dict) else None
        if isinstance(store, dict):
            rows.append(_of_agent(answer.endpoint.url, store))
    return rows


def _of_agent(url: str, store: Mapping[str, Any]) -> Finding:
    usable = store.get("usable")
    figures = f"{store.get('hits')} hits, {store.get('puts')} puts"
    verdicts = {True: Verdict.OK, False: Verdict.FAIL}
    return Finding(
        check=f"store of {url}",
        verdict=verdicts.get(cast("bool", usable), Verdict.INFO),
        finding=f"{store.get('url')}: {store.get('why') or figures}",
        advice=_ADVICE.get(str(store.get("tier")), "") if usable is False else "",
    )


def _read_options(config: Path | None, environment: Mapping[str, str]) -> StoreOptions | None:
    """Return how the agent would use its store; raises ``SettingsError``."""
    settings: Any = resolve_settings(
        settings_class_of("agent"),
        [],
        environment=environment,
        component="agent",
        config_path=None if config is None else str(config),
    ).settings
    store = settings.transfer.store
    if store is None:
        return None
    return StoreOptions(
        url=store.url.get_secret_value(),
        max_bytes=store.max_bytes,
        ttl_seconds=store.ttl_seconds,
        secret=secret_bytes(settings.cluster_secret),
    )


def _judge(options: StoreOptions, seconds: float) -> Finding:
    shown, advice = shown_url(options.url), _ADVICE[tier_of(options.url)]
    error = _try(options, seconds)
    if error is None:
        finding = f"{shown}: a value went there and back"
        return Finding(check=_CHECK, verdict=Verdict.OK, finding=finding)
    finding = f"{shown}: {error.reason}: {error}"
    if error.reason is Reason.STORE_FULL:
        advice = "what is there can be read, but nothing more is stored: give it room"
        return Finding(check=_CHECK, verdict=Verdict.WARN, finding=finding, advice=advice)
    return Finding(check=_CHECK, verdict=Verdict.FAIL, finding=finding, advice=advice)


def _try(options: StoreOptions, seconds: float) -> TransferError | None:
    """Try the store on a thread that can be left behind: a dead network disk holds it for good."""
    late = TransferError(Reason.DEADLINE, f"no answer within {seconds:g} s")
    found: list[TransferError | None] = []

    def run() -> None:
        try:
            try_store(options, Stop(monotonic_ms() + int(seconds * 1000)))
        except TransferError as error:
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + _HANGING_SECONDS)
    return found[0] if found else late
