"""Entry point of ``nearkv-agent``."""

from nearkv.agent.app import READINESS, build_app
from nearkv.agent.settings import AgentSettings
from nearkv.serving import serve
from nearkv.starting import start


def main() -> None:
    """Read the settings and serve until told to stop."""
    start(AgentSettings, "agent", _serve)


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
