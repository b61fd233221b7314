# ruff: noqa: INP001 (a script that is mounted into a pod, in no package)
"""Ask a component for its health and its series, as `helm test` does.

``ask.py URL SERIES``: ends with status 1 unless URL/readyz answers 200 and URL/metrics has SERIES.
The variable TOKEN is shown as bearer token; for https, CA_FILE names the authority, and CERT_FILE
with KEY_FILE the certificate that is shown.
"""

import os
import ssl
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

_WAIT_SECONDS = 60.0
_PAUSE_SECONDS = 2.0
_TIMEOUT_SECONDS = 5.0


def fetch(url: str, *, token: str, ca_file: str) -> str:
    """Return the body of an answer; raises ``OSError`` for anything but 200."""
    if not url.startswith(("http://", "https://")):
        raise SystemExit(f"{url}: not an HTTP URL")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    context = ssl.create_default_context(cafile=ca_file) if ca_file else None
    if context and "CERT_FILE" in os.environ:
        context.load_cert_chain(os.environ["CERT_FILE"], os.environ["KEY_FILE"])
    request = Request(url, headers=headers)  # noqa: S310 (checked above)
    with urlopen(request, timeout=_TIMEOUT_SECONDS, context=context) as answer:  # noqa: S310 (as above)
        return str(answer.read().decode())


def main(url: str, series: str) -> None:
    """Ask until it answers, for a minute at most."""
    token, ca_file = os.environ.get("TOKEN", ""), os.environ.get("CA_FILE", "")
    give_up_at = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fetch(f"{url}/readyz", token=token, ca_file=ca_file)
            metrics = fetch(f"{url}/metrics", token=token, ca_file=ca_file)
        except (URLError, OSError) as error:
            if time.monotonic() >= give_up_at:
                sys.exit(f"{url}: {error}")
            time.sleep(_PAUSE_SECONDS)
        else:
            sys.exit(0 if series in metrics else f"{url}/metrics has no {series}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
