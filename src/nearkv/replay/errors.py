"""What a replay refuses."""

from nearkv.errors import NearkvError


class ReplayError(NearkvError):
    """The question cannot be answered as it was put; the message names the field at fault."""
