"""Errors of the demonstration; each message is meant to be read by a person.

::

    DemoError
    ├── SetUpError      the engine environment or a model could not be made
    ├── LaunchError     a process died, or was not ready in time
    └── ScenarioError   a request of the scenario failed
"""

from nearkv.errors import NearkvError


class DemoError(NearkvError):
    """Base of all errors that end the demonstration with a message."""


class SetUpError(DemoError):
    """The engine environment or a model could not be made."""


class LaunchError(DemoError):
    """A process died or was not ready in time; the message ends with its last log lines."""


class ScenarioError(DemoError):
    """A request of the scenario failed."""
