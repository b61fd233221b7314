"""Errors of tracing.

TracingUnavailableError   it is on, but OpenTelemetry is not installed
ExportFailedError         spans did not arrive; never seen by a request
"""

from nearkv.errors import NearkvError


class TracingUnavailableError(NearkvError):
    """Tracing is on, but OpenTelemetry is not installed."""


class ExportFailedError(NearkvError):
    """The collector did not take the spans."""
