"""Making names and block keys unrecognisable, equal ones staying equal (pure).

Block keys are hashes of prompts: whoever guesses a prompt can check the guess, and prefix ids
are whatever clients put there. Both are hashed with a secret, to so few bits (32 for keys, as
the ids in public traces) that nothing can be worked back.
"""

from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 8
_ID_BYTES = 4
_NAME_BYTES = 8
_SECRET_BYTES = 32


class Anonymiser:
    """Hashes with one secret; replicas that share it give equal ids to equal prefixes."""

    def __init__(self, secret: bytes) -> None:
        self._keys = _keyed(secret, b"keys", _ID_BYTES)
        self._names = _keyed(secret, b"names", _NAME_BYTES)

    def name(self, text: str) -> str:
        """Return what stands for a name that a client gave."""
        digest = self._names.copy()
        digest.update(text.encode(errors="surrogatepass"))
        return digest.hexdigest()

    def ids(self, keys: Sequence[int]) -> list[int]:
        """Return 32-bit ids for block keys."""
        ids = []
        for key in keys:
            digest = self._keys.copy()
            digest.update(key.to_bytes(_KEY_BYTES, "little"))
            ids.append(int.from_bytes(digest.digest(), "little"))
        return ids


def _keyed(secret: bytes, purpose: bytes, size: int) -> "blake2b":
    key = blake2b(secret, digest_size=_SECRET_BYTES, person=b"nearkv records").digest()
    return blake2b(key=key, digest_size=size, person=purpose)
