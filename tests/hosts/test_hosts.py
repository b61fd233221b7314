"""What a path costs is measured as it is, and both ingress and extender go by it.

Probes have their default settings: their budget is what a node of a thousand has.
"""

import asyncio
import os
import sys
import time
from collections import Counter

import pytest

from tests.hosts.cluster import cluster_around
from tests.hosts.network import HOSTS
from tests.hosts.permission import INSIDE, why_not
from tests.hosts.site import three_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAST, SLOW, EQUAL = 160, 24, 80
MINUTE = 60.0


@pytest.fixture(scope="module", autouse=True)
def _inside():
    if not os.environ.get(INSIDE):
        pytest.skip(why_not() or "run by make test-hosts, in a network of its own")


async def test_the_ingress_prefers_the_fast_pair_and_changes_its_mind(report):
    async with three_hosts(n1=FAST, n2=SLOW) as site:
        # Nobody has moved KV yet: probes tell.
        rates = await site.until_measured({("n1", "n3"): FAST, ("n2", "n3"): SLOW})
        report("by probes", rates)
        async with site.ingress() as ingress:
            assert Counter([await site.chosen(ingress) for _ in range(8)]) == {"p1": 8}
            for name in ("p1", "p2"):
                for _ in range(6):
                    await site.pull(name)
            assert (await site.pair("n1", "n3"))["measured_by"] == "pulls"
            rates = await site.until_measured({("n1", "n3"): FAST, ("n2", "n3"): SLOW})
            report("by pulls", rates)
            site.network.limit(n1=SLOW, n2=FAST)
            moved_at = time.monotonic()
            last = []
            while last[-3:] != ["p2"] * 3:
                assert time.monotonic() - moved_at < MINUTE, last
                last.append(await site.chosen(ingress))
                await site.pull(last[-1])
            report("the ingress changed its mind", seconds_since(moved_at))
            rates = await site.until_measured({("n1", "n3"): SLOW, ("n2", "n3"): FAST})
            report("after the limits moved", rates)


async def test_the_extender_prefers_the_fast_pair_and_changes_its_mind(tmp_path, report):
    """From probes alone: nobody moves KV. Sources are on n3, and all are in one rack."""
    one_rack = dict.fromkeys(HOSTS, "r1")
    async with three_hosts(n1=FAST, n2=SLOW) as site:
        rates = await site.until_measured({("n3", "n1"): FAST, ("n3", "n2"): SLOW})
        report("by probes", rates)
        async with cluster_around(site, tmp_path, racks=one_rack) as extender:
            await until_preferred(extender, "n1", over="n2")
            site.network.limit(n1=SLOW, n2=FAST)
            moved_at = time.monotonic()
            await until_preferred(extender, "n2", over="n1", seconds=MINUTE)
            report("the extender changed its mind", seconds_since(moved_at))


async def test_with_equal_links_topology_has_no_effect(tmp_path, report):
    """Neither on which pair the ingress takes, nor on scores, though racks differ."""
    racks = {"n1": "r1", "n2": "r2", "n3": "r1"}
    async with three_hosts(n1=EQUAL, n2=EQUAL) as site:
        limits = dict.fromkeys([("n1", "n3"), ("n2", "n3"), ("n3", "n1"), ("n3", "n2")], EQUAL)
        report("by probes", await site.until_measured(limits))
        async with site.ingress() as ingress:
            counts = Counter([await site.chosen(ingress) for _ in range(24)])
            assert min(counts["p1"], counts["p2"]) >= 24 // 4, counts
        for host in ("n1", "n2"):
            await site.until_counted("n3", host, 5)
        async with cluster_around(site, tmp_path, racks=racks) as extender:
            await until_equal(extender, "n1", "n2")


async def until_preferred(extender, host, *, over, seconds=MINUTE):
    """Wait until the extender scores one host higher than another."""
    give_up_at = time.monotonic() + seconds
    while True:
        scores = await extender.scores(host, over)
        if scores[host] > scores[over]:
            return
        assert time.monotonic() < give_up_at, scores
        await asyncio.sleep(0.25)


async def until_equal(extender, *hosts):
    """Wait until hosts score alike, as soon as the extender has all summaries."""
    give_up_at = time.monotonic() + MINUTE
    while len(set((scores := await extender.scores(*hosts)).values())) > 1:
        assert time.monotonic() < give_up_at, scores
        await asyncio.sleep(0.25)


@pytest.fixture
def report(capsys):
    """Say what was found while the tests run."""

    def write(what, found):
        with capsys.disabled():
            sys.stdout.write(f"\n  {what}: {found}")

    return write


def seconds_since(began):
    return f"after {time.monotonic() - began:.1f} s"
