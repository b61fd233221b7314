"""Entry point of ``nearkv-extender``."""

from nearkv.extender.settings import ExtenderSettings
from nearkv.serving import serve
from nearkv.starting import spare_the_garbage_collector, start


def main() -> None:
    """Read the settings and serve until told to stop."""
    start(ExtenderSettings, "extender", _serve)


async def _serve(settings: ExtenderSettings) -> None:
    # Here and not at the top: help and settings need none of the extender's own libraries.
    from nearkv.extender.app import (  # noqa: PLC0415 - see above
        READINESS,
        TRANSPORT,
        build_app,
    )

    app = build_app(settings)
    spare_the_garbage_collector()
    await serve(
        app,
        address=settings.listen,
        readiness=app[READINESS],
        drain_seconds=settings.drain_seconds,
        transport=app[TRANSPORT],
    )


if __name__ == "__main__":
    main()
