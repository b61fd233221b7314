"""How a component's program starts: settings, logs, event loop, exit."""

import gc
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from nearkv.descriptors import raise_descriptor_limit
from nearkv.errors import NearkvError
from nearkv.logs import configure_logging
from nearkv.serving import run
from nearkv.settings import ServiceSettings, load_settings

S = TypeVar("S", bound=ServiceSettings)


def spare_the_garbage_collector() -> None:
    """Leave what is alive now out of collections, and run them less often.

    Requests and events make thousands of objects but hardly any cycle; with the default
    thresholds the collector would look through all tables again and again, and hold up the event
    loop for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def start(
    settings_class: type[S], component: str, serve: Callable[[S], Coroutine[Any, Any, None]]
) -> None:
    """Read the settings from the command line and serve until told to stop.

    What nearkv refuses on purpose ends the program with its message and status 1, as does
    a library that is not installed, since each component's own come as an extra.
    """
    name = f"nearkv-{component}"
    settings = load_settings(
        settings_class, sys.argv[1:], prog=name, env=os.environ, component=component
    )
    configure_logging(component=component, level=settings.log_level)
    raise_descriptor_limit()
    try:
        run(serve(settings))
    except NearkvError as error:
        sys.exit(f"{name}: {error}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nearkv"):
            raise
        sys.exit(f"{name}: {error}; install it with: pip install 'nearkv[{component}]'")
