"""The one place that holds the version; setup.cfg reads it."""

__version__ = "0.1.0"
