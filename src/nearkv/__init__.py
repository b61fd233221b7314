"""nearkv keeps LLM requests, pods and bytes next to the KV cache they need.

This package is the shared core: block keys, state wire types, freshness, settings,
errors, logging and health conventions. The components (``agent``, ``ingress``,
``extender``, ``transfer``) are folders at the top of the repository, linked in here.
"""

from nearkv._version import __version__

__all__ = ["__version__"]
