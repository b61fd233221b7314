"""Entry point of ``nearkv-extender``."""

import gc

from nearkv.extender.settings import ExtenderSettings
from nearkv.serving import serve
from nearkv.starting import start


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
    _spare_the_garbage_collector()
    await serve(
        app,
        address=settings.listen,
        readiness=app[READINESS],
        drain_seconds=settings.drain_seconds,
        transport=app[TRANSPORT],
    )


def _spare_the_garbage_collector() -> None:
    """Leave what is alive now out of collections, and run them less often.

    A request makes thousands of strings but hardly any cycle; the default thresholds would have
    the collector look through all of them several times within one request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


if __name__ == "__main__":
    main()
