"""The ``nearkv`` command (also ``kubectl nearkv``).

``--help`` must be quick, so only typer is imported at the top; each verb imports what it
needs (aiohttp, pydantic, rich tables) when it runs.
"""
