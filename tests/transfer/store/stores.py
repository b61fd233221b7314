"""Kinds of tiers for the contract suite, and engines' memories to put and pull."""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key
from nearkv.transfer.backends.contract import Region, Stop, monotonic_ms
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.manifest import (
    BlockLayout,
    Compatibility,
    ModelIdentity,
    Numerics,
    Parallelism,
    Source,
)
from nearkv.transfer.store.contract import StoredPrefix
from nearkv.transfer.store.link import StoreLink

LAYERS, BLOCK_BYTES, BLOCK_SIZE, SEGMENT = 2, 512, 4, 4
UNTOUCHED = 0xEE
OWN = Compatibility(
    model=ModelIdentity(name="tiny", config_hash="c0ffee"),
    numerics=Numerics(kv_dtype="bfloat16"),
    parallelism=Parallelism(),
    layout=BlockLayout(
        name="LBHNC", block_size=BLOCK_SIZE, layers=LAYERS, layer_stride=0, block_stride=0,
        block_bytes=BLOCK_BYTES,
    ),
)  # fmt: skip
SOURCE = Source(engine="p0", epoch="e1")


def stop(seconds=30.0):
    return Stop(monotonic_ms() + int(seconds * 1000))


def prefix(blocks, *, seed=1, salt="", lora="", changed_from=None):
    """A prompt of whole blocks; from token ``changed_from`` on it is another one."""
    tokens = [seed * 1000 + i for i in range(blocks * BLOCK_SIZE)]
    if changed_from is not None:
        tokens[changed_from:] = [token + 500_000 for token in tokens[changed_from:]]
    packed = pack_tokens(tokens)
    root = root_key(KeyNamespace("tiny", lora, salt))
    keys = tuple(chain_keys(root, packed, BLOCK_SIZE))
    return StoredPrefix(token_ids=packed, block_keys=keys, cache_salt=salt, lora=lora)


def layout(*, blocks=16, gap=0, offset=0, interleaved=False, block_bytes=BLOCK_BYTES):
    block = block_bytes + gap
    if interleaved:
        layer_stride, block_stride = block, block * LAYERS
    else:
        layer_stride, block_stride = block * blocks + gap, block
    return KvMemory(
        size=offset + LAYERS * (block * blocks + gap), layers=LAYERS, blocks=blocks,
        layer_stride=layer_stride, block_stride=block_stride, block_bytes=block_bytes,
        offset=offset,
    )  # fmt: skip


class Engine:
    """A memory of its own, and a link of it to a tier."""

    def __init__(self, tier, memory=None, *, own=OWN, seed=None, **options):
        self.memory = memory or layout()
        if seed is None:
            self.data = np.full(self.memory.size, UNTOUCHED, np.uint8)
        else:
            self.data = np.random.default_rng(seed).integers(
                0, 256, self.memory.size, dtype=np.uint8
            )
        options = {"segment_blocks": SEGMENT} | options
        layout_ = msgspec.structs.replace(own.layout, block_bytes=self.memory.block_bytes)
        own = msgspec.structs.replace(own, layout=layout_)
        self.link = StoreLink(
            tier, Region(memoryview(self.data), self.memory), own, SOURCE, **options
        )

    def put(self, prefix_, blocks, until=None, still_valid=lambda: None):
        return self.link.put(prefix_, blocks, until or stop(), still_valid=still_valid)

    def pull(self, prefix_, blocks, until=None, skip_blocks=0):
        return self.link.pull(prefix_, blocks, until or stop(), skip_blocks=skip_blocks)

    def block(self, number):
        m = self.memory
        starts = (m.offset + i * m.layer_stride + number * m.block_stride for i in range(m.layers))
        return b"".join(self.data[at : at + m.block_bytes].tobytes() for at in starts)

    def is_untouched(self):
        return bool((self.data == UNTOUCHED).all())


@dataclass
class RedisServer:
    """A real server on a Unix socket, with nothing on disk."""

    folder: Path
    process: subprocess.Popen

    @classmethod
    def start(cls, folder, *options):
        program = shutil.which("redis-server")
        socket = folder / "redis.sock"
        command = [
            program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly",
            "no", "--dir", str(folder), *options,
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = cls(folder, process)
        try:
            server.await_ready()
        except BaseException:
            server.end()
            raise
        return server

    @property
    def url(self):
        return f"unix://{self.folder / 'redis.sock'}"

    def client(self):
        import redis  # noqa: PLC0415 (the suite's file tests need none)

        return redis.Redis.from_url(self.url)

    def await_ready(self, seconds=20):
        import redis  # noqa: PLC0415 (the same)

        end = time.monotonic() + seconds
        while True:
            try:
                with self.client() as client:
                    client.ping()
            except redis.exceptions.ConnectionError:
                assert self.process.poll() is None, "redis-server ended"
                assert time.monotonic() < end, "redis-server does not answer"
                time.sleep(0.01)  # a poll of what cannot be waited for
            else:
                return

    def end(self):
        self.process.kill()
        self.process.wait()


class FilesKind:
    """The file tier, and a look at what it keeps."""

    name = "files"

    def __init__(self, folder):
        from nearkv.transfer.store.files import FileTier  # noqa: PLC0415 (beside redis')

        self.folder = folder / "store"
        self.tier = FileTier(self.folder, max_bytes=1 << 26)

    def raw(self):
        return {file.stem: file.read_bytes() for file in self.folder.glob("??/*.kvsp")}

    def write(self, key, value):
        folder = self.folder / key[:2]
        folder.mkdir(exist_ok=True)
        (folder / f"{key}.kvsp").write_bytes(value)

    def leftovers(self):
        return list(self.folder.glob("??/*.part"))

    def close(self):
        self.tier.close()


class RedisKind:
    """The Redis tier, and a look at what it keeps."""

    name = "redis"

    def __init__(self, server):
        from nearkv.transfer.store.redis_store import (  # noqa: PLC0415 (needs redis-py)
            RedisSettings,
            RedisTier,
        )

        self.client = server.client()
        self.client.flushall()
        self.tier = RedisTier(RedisSettings(url=server.url, call_seconds=20))
        self.prefix = "nearkv:kv:"

    def raw(self):
        keys = [key.decode() for key in self.client.keys(f"{self.prefix}*")]
        return {key.removeprefix(self.prefix): self.client.get(key) for key in keys}

    def write(self, key, value):
        self.client.set(self.prefix + key, value)

    def leftovers(self):
        return [key for key in self.raw() if ":" in key]

    def close(self):
        self.client.close()


def redis_missing():
    """Why tests with Redis cannot run here, or nothing."""
    return "" if shutil.which("redis-server") else "redis-server is not installed (apt-get)"


def is_root():
    return os.geteuid() == 0
