"""Where each token of a text ends, and where a text can be cut between tokens (pure).

To tokenize only what is new in a growing prompt, two things must be known: at which byte of
the text each token ends, and that the tokens left of a cut do not depend on what follows.

Byte-level BPE tokenizers (GPT-2's alphabet: Llama 3, Qwen, Mistral, SmolLM, ...) spell each
byte as one character, so a token's length is its byte length, and the spelling proves the
alignment: read back, it must give the text. Other tokenizers give no alignment here, and
their prompts are tokenized whole.

A cut is made only before a space that stands between two ASCII letters or digits. Every
byte-level pre-tokenizer splits there, so no merge can reach across. The claim is checked
against each model's engine before it is used (``nearkv.ingress.tokens.service``).
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def _byte_alphabet() -> dict[int, int]:
    """Return GPT-2's map from a printable code point to the byte it spells."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in spelled)
    spelled.update({256 + i: byte for i, byte in enumerate(others)})
    return spelled


_TO_BYTE = _byte_alphabet()
_SPACE = 0x20
_MOST_LOOKED_AT = 4096


def align_tokens(text: bytes, token_strs: Sequence[str]) -> "array[int] | None":
    """Return the byte offset in ``text`` at which each token ends.

    A special token that the tokenizer put in front (``<s>``, say) ends at 0. ``None`` when
    the spelling does not read back as the text.
    """
    for leading in (0, 1):
        spelled = "".join(token_strs[leading:]).translate(_TO_BYTE)
        try:
            read_back = spelled.encode("latin-1")
        except UnicodeEncodeError:
            continue
        if read_back == text:
            ends = array("I", [0] * leading)
            ends.extend(accumulate(map(len, token_strs[leading:])))
            return ends
    return None


def find_cut(text: bytes, ends: Sequence[int], limit: int) -> int | None:
    """Return the number of tokens left of the last safe cut at or before byte ``limit``.

    ``None`` where there is none near: many languages have none at all.
    """
    last = bisect_right(ends, limit)
    for count in range(last, max(0, last - _MOST_LOOKED_AT), -1):
        at = ends[count - 1]
        if _is_safe(text, at):
            return count
    return None


def _is_safe(text: bytes, at: int) -> bool:
    if not 0 < at < len(text) - 1 or text[at] != _SPACE:
        return False
    before, after = text[at - 1], text[at + 1]
    return _is_alphanumeric(before) and _is_letter(after)


def _is_letter(byte: int) -> bool:
    return 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A  # noqa: PLR2004 (ASCII ranges)


def _is_alphanumeric(byte: int) -> bool:
    return _is_letter(byte) or 0x30 <= byte <= 0x39  # noqa: PLR2004 (ASCII range)
