"""How much of a lease an engine may use (pure).

``transfer.manifest.check_fit`` says whether all of a packet fits; here a part may. What the
KV is must be equal in any case. Its tokens need to agree only as far as it is used, and the
answer is the number of whole blocks up to the first difference.
"""

from nearkv.transfer.errors import PacketError, Reason
from nearkv.transfer.manifest import Compatibility, Manifest, check_fit

_TOKEN_BYTES = 4


def fitting_blocks(
    manifest: Manifest,
    own: Compatibility,
    token_ids: bytes,
    *,
    cache_salt: str = "",
    lora: str = "",
) -> int:
    """Return how many leading blocks of a packet fit a request, at least one.

    ``own`` is what the engine is, ``token_ids`` the packed tokens of *its* request. Raises
    :class:`PacketError` whose message names the field that differs.
    """
    check_fit(manifest, own, manifest.prefix.token_ids)  # the kind; the tokens come below
    _check_namespace(manifest, cache_salt=cache_salt, lora=lora)
    block_bytes = own.layout.block_size * _TOKEN_BYTES
    offered = min(len(manifest.block_ids), len(token_ids) // block_bytes)
    if not offered:
        raise PacketError(Reason.RANGE, "not one whole block of the request's is offered")
    blocks = _equal_blocks(manifest.prefix.token_ids, token_ids, block_bytes, offered)
    if not blocks:
        raise PacketError(Reason.PREFIX, "token_ids: the first block's are not the request's")
    return blocks


def _check_namespace(manifest: Manifest, *, cache_salt: str, lora: str) -> None:
    """Make sure that equal tokens mean equal KV. A salt is a secret: it is not shown."""
    prefix = manifest.prefix
    if prefix.cache_salt != cache_salt:
        raise PacketError(Reason.PREFIX, "cache_salt: theirs is not the request's")
    if prefix.lora != lora:
        raise PacketError(Reason.PREFIX, f"lora: theirs is {prefix.lora!r}, ours is {lora!r}")


def _equal_blocks(theirs: bytes, ours: bytes, block_bytes: int, most: int) -> int:
    """Return how many leading blocks have the same tokens, at most ``most``."""
    if theirs[: most * block_bytes] == ours[: most * block_bytes]:
        return most
    low, high = 0, most  # the first ``low`` are equal, the first ``high`` are not
    while high - low > 1:
        middle = (low + high) // 2
        if (
            theirs[low * block_bytes : middle * block_bytes]
            == (ours[low * block_bytes : middle * block_bytes])
        ):
            low = middle
        else:
            high = middle
    return low
