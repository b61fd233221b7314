"""How much of a prefix a store has, without bringing any of it."""

from itertools import takewhile

from nearkv.transfer.backends.contract import Stop
from nearkv.transfer.store.contract import StoredPrefix, Tier
from nearkv.transfer.store.packing import Packer, Segment


def count_stored(
    tier: Tier,
    packer: Packer,
    prefix: StoredPrefix,
    stop: Stop,
    *,
    segment_blocks: int,
    first_block: int = 0,
) -> int:
    """Return how many leading blocks could be had, where the first ``first_block`` are there.

    0 says that the store has nothing beyond those. Two questions to the tier, whatever the
    length. What is stored may be gone, or prove damaged, when it is pulled. Raises
    :class:`PullError` when the tier cannot say.
    """
    total = len(prefix.block_keys)
    done = first_block - first_block % segment_blocks
    whole = [
        Segment(begin, begin + segment_blocks)
        for begin in range(done, total - segment_blocks + 1, segment_blocks)
    ]
    there = tier.present([packer.key(prefix, segment) for segment in whole], stop) if whole else []
    done += segment_blocks * sum(1 for _ in takewhile(bool, there))
    # One that is shorter than the others is a prefix's last.
    shorter = range(min(done + segment_blocks - 1, total), done, -1)
    keys = [packer.key(prefix, Segment(done, end)) for end in shorter]
    for end, found in zip(shorter, tier.present(keys, stop) if keys else [], strict=True):
        if found:
            done = end
            break
    return done if done > first_block else 0
