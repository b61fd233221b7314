"""A kubelet's pod-resources server on a Unix socket: real gRPC, messages built by hand."""

import asyncio
import importlib
from contextlib import asynccontextmanager


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number(field, value):
    return varint(field << 3) + varint(value)


def content(field, value):
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def plugin_devices(resource, *ids):
    numa = content(3, content(1, number(1, 1)))  # a topology, which is of no use here
    return content(1, resource) + b"".join(content(2, one) for one in ids) + numa


def claim(driver, device):
    cdi = content(1, content(1, "k8s.gpu.nvidia.com/claim=x"))
    resource = cdi + content(2, driver) + content(3, "pool") + content(4, device)
    return content(2, "claim") + content(3, "default") + content(4, resource)


def container(*devices, claims=()):
    cpus = content(3, varint(3) + varint(300)) + number(3, 7)  # packed and not
    plugins = b"".join(content(2, one) for one in devices)
    return content(1, "main") + plugins + cpus + b"".join(content(5, one) for one in claims)


def pod(name, *containers, namespace="default"):
    body = content(1, name) + content(2, namespace)
    return body + b"".join(content(3, one) for one in containers)


def pod_list(*pods):
    return b"".join(content(1, one) for one in pods)


class Kubelet:
    """What it answers; ``None`` hangs, a string is a gRPC status to fail with."""

    def __init__(self):
        self.pods = b""
        self.allocatable = b""
        self.asked = []


@asynccontextmanager
async def serving(kubelet, socket):
    grpc = importlib.import_module("grpc")
    aio = importlib.import_module("grpc.aio")

    def answer(name, attribute):
        async def handle(request, context):
            assert request == b""
            kubelet.asked.append(name)
            found = getattr(kubelet, attribute)
            if isinstance(found, str):
                await context.abort(getattr(grpc.StatusCode, found), "as told")
            if found is None:
                await asyncio.Event().wait()
            return found

        return grpc.unary_unary_rpc_method_handler(handle)

    server = aio.server()
    methods = {
        "List": answer("List", "pods"),
        "GetAllocatableResources": answer("GetAllocatableResources", "allocatable"),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods),)
    )
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield kubelet
    finally:
        await server.stop(grace=None)
