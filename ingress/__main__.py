"""Entry point of ``nearkv-ingress``."""

from nearkv.ingress.settings import IngressSettings, Mode
from nearkv.serving import serve
from nearkv.starting import spare_the_garbage_collector, start


def main() -> None:
    """Read the settings and serve until told to stop."""
    start(IngressSettings, "ingress", _serve)


async def _serve(settings: IngressSettings) -> None:
    if settings.mode is Mode.SIDECAR:
        from nearkv.ingress.sidecar.app import serve_sidecar  # noqa: PLC0415 - see below

        await serve_sidecar(settings)
        return
    # Here and not at the top: help and settings need none of the ingress's own libraries.
    from nearkv.ingress.app import (  # noqa: PLC0415 - see above
        KNOWLEDGE,
        READINESS,
        build_app,
    )

    app = await build_app(settings)
    spare_the_garbage_collector()
    await serve(
        app,
        address=settings.listen,
        readiness=app[READINESS],
        in_flight=app[KNOWLEDGE].in_flight,
        drain_seconds=settings.drain_seconds,
    )


if __name__ == "__main__":
    main()
