"""15,000 Nodes, listed page by page: the memory it takes is that of a page, not of the list."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.api_server import ApiServerDouble, node_object

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
ROOT = Path(__file__).parents[3]
COUNT = 15_000
CLIENT = """
import asyncio, pathlib, re, sys
import msgspec
from nearkv.kube.access import ApiAccess
from nearkv.kube.objects import NODES_PATH, Node
from nearkv.kube.watching import Watch

def peak_bytes():
    # Not getrusage: its peak begins with that of the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

async def main(url):
    nodes = msgspec.json.Decoder(Node)
    listed = []
    async with ApiAccess.plain(url) as access:
        # Whatever is loaded or allocated once belongs to the start, not to the list.
        await access.read("GET", NODES_PATH, params={"limit": "500"}, limit_bytes=64 << 20)
        before = peak_bytes()
        watch = Watch(
            access, NODES_PATH, decode=lambda raw: nodes.decode(raw).name,
            on_replace=listed.extend, on_change=lambda kind, name: None,
        )
        task = asyncio.create_task(watch.run())
        await watch.wait_until_synced()
        task.cancel()
    print(len(listed), len(set(listed)), peak_bytes() - before)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_large_list_takes_the_memory_of_its_pages():
    # As large as those of the reference measurements: 8 kB, most of it images of the kubelet.
    images = [{"names": ["registry.example/image@sha256:" + "0" * 64], "sizeBytes": 1}] * 60
    async with ApiServerDouble() as api:
        for number in range(COUNT):
            node = node_object(f"node-{number:05d}")
            node["status"]["images"] = images
            api.put(node)
        done = await asyncio.to_thread(run_client, api.url)
        total_bytes = sum(seen.body_bytes for seen in api.record.all("list")[1:])
        assert len(api.record.all("list")) == 1 + COUNT // 500
    listed, different, grown_bytes = map(int, done.split())
    assert listed == different == COUNT
    assert total_bytes > 90e6
    assert grown_bytes < total_bytes / 3


def run_client(url):
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, url],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
