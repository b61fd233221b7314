"""What the scheduler's side tells the worker's side with each engine step (pickled by vLLM)."""

from dataclasses import dataclass, field

from nearkv.transfer.messages import LeaseAddress


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring a lease's blocks from ``first_block`` on into ``target_blocks``.

    ``lookup`` is the id of the lookup that found them.
    """

    request_id: str
    address: LeaseAddress
    first_block: int
    target_blocks: tuple[int, ...]
    deadline_ms: int
    lookup: int = 0


@dataclass(slots=True)
class StepPlan:
    """One step's orders: loads to begin, loads to cancel, requests whose leases ended."""

    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
