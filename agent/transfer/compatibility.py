"""What must be equal for one engine to use another's KV, as one short text (pure)."""

import hashlib

import msgspec

from nearkv.transfer.manifest import Compatibility

_DIGEST_BYTES = 16


def digest_facts(facts: object) -> str:
    """Digest facts that must be equal; two engines fit when their digests do."""
    data = msgspec.msgpack.encode(facts)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def digest_compatibility(compatibility: Compatibility) -> str:
    """Digest a worker's compatibility, whatever its rank.

    The model's name is for people; ``manifest.check_fit`` passes over it, too.
    """
    return digest_facts(
        msgspec.structs.replace(
            compatibility,
            model=msgspec.structs.replace(compatibility.model, name=""),
            parallelism=msgspec.structs.replace(compatibility.parallelism, tp_rank=0),
        )
    )
