"""``kv_transfer_params``: what travels through the router in request and answer bodies (pure).

The keys that every P/D router knows (``do_remote_prefill`` and so on) keep their meaning; our
own carry the address of the lease. Whatever a client writes there is checked: a lease is only
a name for what the agents hold, and it is they who decide.
"""

from collections.abc import Mapping
from typing import Any

from nearkv.transfer.messages import LeaseAddress

_MAX_LENGTH = 512


def wants_lease(params: Mapping[str, Any] | None) -> bool:
    """Tell whether the request is a prefill for somebody else."""
    return bool(params and params.get("do_remote_decode"))


def lease_params(address: LeaseAddress, num_tokens: int) -> dict[str, Any]:
    """Return what P answers: how D finds the lease, and how many tokens it covers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": address.engine,
        "remote_epoch": address.epoch,
        "remote_lease_id": address.lease,
        "remote_node": address.node,
        "remote_agent": address.agent,
        "remote_num_tokens": num_tokens,
    }


def read_address(params: Mapping[str, Any] | None) -> LeaseAddress | None:
    """Return the lease that a request brings; ``None`` where it brings none of ours."""
    if not params or not params.get("do_remote_prefill"):
        return None
    names = ("remote_lease_id", "remote_engine_id", "remote_epoch", "remote_node", "remote_agent")
    values = [params.get(name) for name in names]
    if not all(isinstance(value, str) and len(value) <= _MAX_LENGTH for value in values):
        return None
    lease, engine, epoch, node, agent = (str(value) for value in values)
    if not (lease and engine and epoch):
        return None
    return LeaseAddress(lease=lease, engine=engine, epoch=epoch, node=node, agent=agent)
