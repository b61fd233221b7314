"""Spans of requests, made from their records; OpenTelemetry is loaded only where it is on."""
