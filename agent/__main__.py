"""Entry point of ``nearkv-agent``."""

import os
import sys

from nearkv.agent.app import READINESS, build_app
from nearkv.agent.settings import AgentSettings
from nearkv.errors import NearkvError
from nearkv.logs import configure_logging
from nearkv.serving import run, serve
from nearkv.settings import load_settings


def main() -> None:
    """Read the settings and serve until told to stop."""
    settings = load_settings(
        AgentSettings, sys.argv[1:], prog="nearkv-agent", env=os.environ, component="agent"
    )
    configure_logging(component="agent", level=settings.log_level)
    try:
        run(_serve(settings))
    except NearkvError as error:
        sys.exit(f"nearkv-agent: {error}")


async def _serve(settings: AgentSettings) -> None:
    app = build_app(settings)
    await serve(
        app,
        address=settings.listen,
        readiness=app[READINESS],
        drain_seconds=settings.drain_seconds,
    )


if __name__ == "__main__":
    main()
