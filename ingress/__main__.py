"""Entry point of ``nearkv-ingress``."""

import os
import sys

from nearkv.errors import NearkvError
from nearkv.ingress.app import READINESS, build_app
from nearkv.ingress.settings import IngressSettings
from nearkv.logs import configure_logging
from nearkv.serving import run, serve
from nearkv.settings import load_settings


def main() -> None:
    """Read the settings and serve until told to stop."""
    settings = load_settings(
        IngressSettings, sys.argv[1:], prog="nearkv-ingress", env=os.environ, component="ingress"
    )
    configure_logging(component="ingress", level=settings.log_level)
    try:
        run(_serve(settings))
    except NearkvError as error:
        sys.exit(f"nearkv-ingress: {error}")


async def _serve(settings: IngressSettings) -> None:
    app = await build_app(settings)
    await serve(
        app,
        address=settings.listen,
        readiness=app[READINESS],
        drain_seconds=settings.drain_seconds,
    )


if __name__ == "__main__":
    main()
