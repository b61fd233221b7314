"""Fixtures: every test with ``kind`` runs once per tier."""

import tempfile
from pathlib import Path

import pytest

from tests.transfer.store.stores import FilesKind, RedisKind, RedisServer, redis_missing


@pytest.fixture
def make_redis():
    """Start real servers; their sockets need short paths."""
    if redis_missing():
        pytest.skip(redis_missing())
    servers = []
    with tempfile.TemporaryDirectory(prefix="nkv-redis-", dir="/tmp") as folder:

        def make(*options):
            place = Path(folder) / str(len(servers))
            place.mkdir()
            servers.append(RedisServer.start(place, *options))
            return servers[-1]

        yield make
        for server in servers:
            server.end()


@pytest.fixture(params=["files", "redis"])
def kind(request, tmp_path):
    if request.param == "files":
        kind = FilesKind(tmp_path)
    else:
        kind = RedisKind(request.getfixturevalue("make_redis")())
    yield kind
    kind.close()
