"""Entry point of ``nearkv-agent``."""

from nearkv.agent.settings import AgentSettings
from nearkv.serving import serve
from nearkv.starting import start


def main() -> None:
    """Read the settings and serve until told to stop."""
    start(AgentSettings, "agent", _serve)


async def _serve(settings: AgentSettings) -> None:
    # Here and not at the top: help and settings need none of the agent's own libraries.
    from nearkv.agent.app import READINESS, build_app  # noqa: PLC0415 - see above

    app = build_app(settings)
    await serve(
        app,
        address=settings.listen,
        readiness=app[READINESS],
        drain_seconds=settings.drain_seconds,
    )


if __name__ == "__main__":
    main()
