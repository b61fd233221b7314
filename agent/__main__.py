"""Entry point of ``nearkv-agent``."""

import os

from nearkv.agent.settings import AgentSettings
from nearkv.serving import serve
from nearkv.starting import spare_the_garbage_collector, start


def main() -> None:
    """Read the settings and serve until told to stop."""
    start(AgentSettings, "agent", _serve)


async def _serve(settings: AgentSettings) -> None:
    # Here and not at the top: help and settings need none of the agent's own libraries.
    from nearkv.agent.app import READINESS, TRANSPORT, build_app  # noqa: PLC0415 - see above
    from nearkv.agent.kubernetes.surroundings import (  # noqa: PLC0415 - see above
        complete_settings,
    )

    settings = complete_settings(settings, os.environ)
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
