"""Patching one object, by merge patch or server-side apply, with a deadline.

Both kinds can be sent twice without harm, so what may have been lost is sent again: connections
that broke, 429 and 5xx. A refusal is told at once.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from nearkv.kube.access import ApiAccess
from nearkv.kube.errors import ApiError, PatchError, Trouble

_AGAIN = frozenset(
    {Trouble.THROTTLED, Trouble.SERVER_ERROR, Trouble.UNREACHABLE, Trouble.SILENT}
    | {Trouble.UNAUTHORIZED, Trouble.CREDENTIALS}
)
_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLimits:
    """How long and how often a patch is tried; all in seconds but ``attempts``."""

    deadline_seconds: float = 30.0
    attempt_seconds: float = 10.0
    attempts: int = 5
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 10.0


class Patcher:
    """Patches objects of one API server."""

    def __init__(
        self,
        access: ApiAccess,
        *,
        limits: PatchLimits | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Make a patcher; ``draw`` returns random numbers from 0 to 1, for jitter."""
        self._access = access
        self._limits = limits or PatchLimits()
        self._draw = draw

    async def annotate(self, path: str, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of the object at ``path``; ``None`` removes one.

        Raises :class:`PatchError`.
        """
        await self.merge(path, {"metadata": {"annotations": dict(annotations)}})

    async def merge(self, path: str, patch: object) -> bytes:
        """Merge JSON into the object at ``path`` (RFC 7386); return the object's JSON.

        A status is at ``<path>/status``. Raises :class:`PatchError`.
        """
        body = msgspec.json.encode(patch)
        return await self._send(path, body, "application/merge-patch+json", {})

    async def apply(
        self, path: str, configuration: object, *, field_manager: str, force: bool = True
    ) -> bytes:
        """Apply fields as ``field_manager``; return the object's JSON.

        ``configuration`` has apiVersion, kind, metadata.name and the fields to own; owned ones that
        are missing from it are removed. ``force`` takes fields over from other managers; without it
        that is a ``CONFLICT``. Raises :class:`PatchError`.
        """
        # JSON is YAML, and every API server takes it under this name.
        params = {"fieldManager": field_manager, "force": "true" if force else "false"}
        body = msgspec.json.encode(configuration)
        return await self._send(path, body, "application/apply-patch+yaml", params)

    async def _send(
        self, path: str, body: bytes, content_type: str, params: Mapping[str, str]
    ) -> bytes:
        last: ApiError | None = None
        try:
            async with asyncio.timeout(self._limits.deadline_seconds):
                for attempt in range(self._limits.attempts):
                    if last is not None:
                        await asyncio.sleep(self._pause_seconds(attempt, last))
                    try:
                        return await self._access.read(
                            "PATCH",
                            path,
                            limit_bytes=_ANSWER_BYTES,
                            params=params,
                            body=body,
                            content_type=content_type,
                            total_seconds=self._limits.attempt_seconds,
                        )
                    except ApiError as error:
                        if error.trouble not in _AGAIN:
                            raise PatchError(
                                error.trouble, f"{path}: {error}", status=error.status
                            ) from error
                        last = error
        except TimeoutError:
            pass
        raise self._given_up(path, last)

    def _given_up(self, path: str, last: ApiError | None) -> PatchError:
        if last is None:
            seconds = self._limits.deadline_seconds
            return PatchError(Trouble.SILENT, f"{path}: not patched within {seconds:g} s")
        error = PatchError(last.trouble, f"{path}: given up: {last}", status=last.status)
        error.__cause__ = last
        return error

    def _pause_seconds(self, attempt: int, error: ApiError) -> float:
        limits = self._limits
        pause = min(limits.first_pause_seconds * 2.0 ** (attempt - 1), limits.longest_pause_seconds)
        pause *= 0.5 + self._draw() / 2
        # A server that asks for more than the deadline is given up on by the deadline.
        return max(pause, (error.retry_after_seconds or 0.0) * (1 + self._draw() / 5))
