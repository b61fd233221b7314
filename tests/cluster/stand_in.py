"""Stand-ins for the three binaries, made of the doubles: they show that the plane is put together.

Run as ``python -m tests.cluster.stand_in <name> <the binary's own arguments>``.
"""

import asyncio
import json
import ssl
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from aiohttp import web

from tests.doubles.api_server import ApiServerConfig, ApiServerDouble
from tests.doubles.api_server.resources import NODES, PODS, Resource
from tests.doubles.scheduler import SchedulerConfig
from tests.doubles.scheduler.api_source import scheduling
from tests.extender.tls_files import make_pair

_NAMESPACES = Resource("Namespace", "namespaces", is_namespaced=False)


async def etcd(arguments: Namespace) -> None:
    """Be healthy, for that is all that is asked here."""
    port = int(arguments.listen_client_urls.rpartition(":")[2])
    await _serve("/health", port, None)


async def api_server(arguments: Namespace) -> None:
    """Serve the double of an API server over TLS, to who has the token."""
    token = _read(arguments.token_auth_file).split(",")[0]
    config = ApiServerConfig(
        port=arguments.secure_port,
        tls=_tls(arguments.cert_dir),
        tokens=frozenset({token}),
        resources=(NODES, PODS, _NAMESPACES),
    )
    async with ApiServerDouble(config) as api:
        api.put({"kind": "Namespace", "metadata": {"name": "default"}})
        await asyncio.Event().wait()


async def scheduler(arguments: Namespace) -> None:
    """Run the double of a scheduler with a real one's configuration."""
    kubeconfig = json.loads(_read(arguments.config))["clientConnection"]["kubeconfig"]
    access = json.loads(_read(kubeconfig))
    url = access["clusters"][0]["cluster"]["server"]
    headers = {"Authorization": f"Bearer {access['users'][0]['user']['token']}"}
    async with scheduling(url, SchedulerConfig.load(Path(arguments.config)), headers=headers):
        await _serve("/healthz", arguments.secure_port, _tls(arguments.cert_dir))


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _tls(folder: str) -> ssl.SSLContext:
    Path(folder).mkdir(exist_ok=True)
    pair = make_pair(Path(folder), "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    return context


async def _serve(path: str, port: int, tls: ssl.SSLContext | None) -> None:
    async def well(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get(path, well)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    await asyncio.Event().wait()


def main() -> None:
    """Take the place of the binary that is named first."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("name")
    for flag in ("--listen-client-urls", "--token-auth-file", "--cert-dir", "--config"):
        parser.add_argument(flag)
    parser.add_argument("--secure-port", type=int)
    arguments, _ = parser.parse_known_args(sys.argv[1:])
    programs = {"etcd": etcd, "kube-apiserver": api_server, "kube-scheduler": scheduler}
    asyncio.run(programs[arguments.name](arguments))


if __name__ == "__main__":
    main()
