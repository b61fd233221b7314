"""Settings of tracing; part of the ingress's settings."""

from pydantic import Field

from nearkv.settings import HttpUrl, SettingsGroup


class TracingSettings(SettingsGroup):
    """Spans by OpenTelemetry; needs the extra otel. See docs/routing.md."""

    enabled: bool = Field(
        False,  # noqa: FBT003 (pydantic's way to give a default)
        description="Export spans of requests; the traceparent of clients is passed on anyway.",
    )
    endpoint: HttpUrl = Field(
        "http://127.0.0.1:4318/v1/traces", description="OTLP/HTTP endpoint for traces."
    )
    sampling_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the requests that are traced; for those that come with a "
        "traceparent, its own flag says.",
    )
    service_name: str = Field("nearkv-ingress", description="service.name of the spans.")
    export_seconds: float = Field(5.0, gt=0, description="Deadline of one export.")
    max_waiting: int = Field(
        2048,
        ge=1,
        description="Requests whose spans may wait to be exported; more are dropped, and counted.",
    )
