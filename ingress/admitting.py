"""Admission: who may ask, how urgent it is, and waiting for room."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from nearkv.ingress.errors import NoRoomError, QueueFullError, RequestError, TenantLimitError
from nearkv.ingress.metrics import AdmissionMetrics
from nearkv.ingress.tenants import Tenant, Tenants
from nearkv.ingress.waiting_room import WaitingRoom

PRIORITY_HEADER = "X-Nearkv-Priority"
_MOST_PRIORITY = 100
_BEARER = "bearer"

T = TypeVar("T")


class Admission:
    """Lets requests in; without ``tenants``, anybody's."""

    def __init__(
        self, room: WaitingRoom, metrics: AdmissionMetrics, tenants: Tenants | None, *, waits: bool
    ) -> None:
        self._room = room
        self._metrics = metrics
        self._tenants = tenants
        self.may_wait = waits

    def admit(self, headers: Mapping[str, str]) -> tuple[Tenant | None, int]:
        """Return a request's tenant and priority.

        Raises ``KeyRefusedError``, ``TenantLimitError`` and, for a priority that is none,
        ``RequestError``. What a client may claim is bounded by its tenant.
        """
        told = headers.get(PRIORITY_HEADER)
        priority = 0 if told is None else read_priority(told)
        if self._tenants is None:
            return None, priority
        tenant = self._checked(self._tenants, headers)
        self._metrics.tenants.add(tenant.spec.name, "admitted")
        return tenant, min(priority, tenant.spec.max_priority)

    def _checked(self, tenants: Tenants, headers: Mapping[str, str]) -> Tenant:
        try:
            return tenants.admit(_key_of(headers))
        except TenantLimitError as error:
            self._metrics.tenants.add(error.tenant, error.reason)
            raise

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count a prompt's tokens; raises ``TenantLimitError``."""
        if self._tenants is None or not tokens:
            return
        try:
            self._tenants.charge(tenant, tokens)
        except TenantLimitError as error:
            self._metrics.tenants.add(error.tenant, error.reason)
            raise

    def must_queue(self, model: str, priority: int) -> bool:
        """Tell whether others wait who come first."""
        return self._room.count > 0 and self._room.must_queue(model, priority)

    async def in_turn(
        self,
        model: str,
        priority: int,
        attempt: Callable[[], T],
        *,
        again: Callable[[], T] | None = None,
        queued: Callable[[], None] | None = None,
    ) -> T:
        """Return what ``attempt`` does, at once, or in turn where there is no room yet.

        ``queued`` is called where the request has to wait; from then on it is ``again`` that
        tries, for a fleet that is no longer the same.
        """
        if not self.must_queue(model, priority):
            try:
                return attempt()
            except NoRoomError:
                if not self.may_wait:
                    raise
        if queued is not None:
            queued()
        return await self.wait(model, priority, again or attempt)

    async def wait(self, model: str, priority: int, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` does once there is room; raises as the waiting room does."""
        started_at = time.perf_counter()
        outcome = "gone"
        try:
            result = await self._room.wait(model, priority, attempt)
            outcome = "admitted"
        except QueueFullError:
            outcome = "full"
            raise
        except NoRoomError:
            outcome = "timeout"
            raise
        finally:
            self._metrics.waits.add(outcome)
            self._metrics.wait_seconds.observe(time.perf_counter() - started_at)
        return result

    def wake(self) -> None:
        """Note that a request ended."""
        if self._room.count:
            self._room.wake()


def read_priority(text: str) -> int:
    """Return a priority; raises ``RequestError`` naming the header."""
    try:
        priority = int(text)
    except ValueError:
        priority = _MOST_PRIORITY + 1
    if abs(priority) > _MOST_PRIORITY:
        raise RequestError(
            f"{PRIORITY_HEADER}: expected a whole number from {-_MOST_PRIORITY} to "
            f"{_MOST_PRIORITY}, got {text[:20]!r}",
            param=PRIORITY_HEADER,
        )
    return priority


def _key_of(headers: Mapping[str, str]) -> str:
    """Return the API key, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == _BEARER:  # names of schemes have no case (RFC 9110, 11.1)
        return key.strip()
    return headers.get("X-Api-Key", "").strip()
