"""What can go wrong between the ingress and an engine.

They are aiohttp's errors by kind, so that whoever talks to engines and to agents needs to know
one family.
"""

import aiohttp


class NotReachedError(aiohttp.ClientConnectionError):
    """No connection came about: the engine knows nothing of the request."""


class AnswerBrokenError(aiohttp.ClientPayloadError):
    """The connection ended within an answer, or what came was no HTTP."""


class EngineLeftError(aiohttp.ServerDisconnectedError):
    """The engine closed the connection without a word about the request."""
