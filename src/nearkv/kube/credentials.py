"""Where the API server is and who we are to it, by the ``kubernetes`` package (blocking).

The package knows kubeconfigs, exec plugins, OIDC and service accounts, and is used for that only:
decision 0009. It is imported when credentials are loaded. Everything here may take seconds, an
exec plugin above all, and belongs in a thread.
"""

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from nearkv.kube.errors import AccessError

_TOKEN_SCHEME = "BearerToken"  # noqa: S105 (the package's name of a scheme, no secret)
_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How to reach the API server.

    ``url`` has no slash at its end. ``server_hostname`` is the name to find in its certificate
    where that is not the URL's. ``authorization`` returns the present header, empty for none; it
    blocks, and renews a token that is about to expire. ``is_anonymous`` tells that configuration
    has neither token nor certificate, which is hardly meant.
    """

    url: str
    tls: ssl.SSLContext | None = None
    server_hostname: str | None = None
    proxy: str | None = None
    authorization: Callable[[], str] | None = None
    is_anonymous: bool = False


Loader = Callable[[], Endpoint]


def plain(url: str, token: str = "") -> Loader:
    """Return a loader for a URL as it is, with a token that never changes."""

    def load() -> Endpoint:
        header = f"Bearer {token}" if token else ""
        return Endpoint(url=url.rstrip("/"), authorization=lambda: header)

    return load


def from_kubeconfig(path: str = "", context: str = "") -> Loader:
    """Return a loader for kubeconfig files.

    ``path`` may name several, as ``KUBECONFIG`` may, which it stands for when it is empty (and
    ``~/.kube/config`` for that). Nothing is written back to them.
    """

    def load() -> Endpoint:
        files = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
        return _load(
            f"the kubeconfig {files}",
            lambda configuration: import_module("kubernetes.config").load_kube_config(
                config_file=files,
                context=context or None,
                client_configuration=configuration,
                persist_config=False,
            ),
        )

    return load


def from_service_account(
    folder: Path = _SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ
) -> Loader:
    """Return a loader for the service account that Kubernetes mounts into a pod."""

    def load() -> Endpoint:
        def fill(configuration: object) -> None:
            module = import_module("kubernetes.config.incluster_config")
            module.InClusterConfigLoader(
                token_filename=str(folder / "token"),
                cert_filename=str(folder / "ca.crt"),
                environ=environ,
            ).load_and_set(configuration)

        return _load(f"the service account in {folder}", fill)

    return load


def automatic(kubeconfig: str = "", context: str = "") -> Loader:
    """Return the loader that fits: a kubeconfig that was named, else the pod's service account.

    A kubeconfig is named by ``kubeconfig`` or ``KUBECONFIG``; outside of a pod it is
    ``~/.kube/config``.
    """
    named = kubeconfig or context or os.environ.get("KUBECONFIG")
    if named or not os.environ.get(_SERVICE_HOST):
        return from_kubeconfig(kubeconfig, context)
    return from_service_account()


def _load(source: str, fill: Callable[[Any], None]) -> Endpoint:
    """Let the package fill its configuration in; its many kinds of errors become one."""
    try:
        configuration = import_module("kubernetes.client").Configuration()
        fill(configuration)
        return _endpoint(configuration)
    except ImportError as error:
        raise AccessError(
            "the kubernetes package is missing: pip install 'nearkv[extender]', 'nearkv[agent]' "
            "or, for the ingress, 'nearkv[envoy]'"
        ) from error
    except Exception as error:
        raise AccessError(f"cannot use {source}: {error}") from error


def _endpoint(configuration: Any) -> Endpoint:  # noqa: ANN401 (the package's has no types)
    url = configuration.host.rstrip("/")
    tls = _tls(configuration) if url.startswith("https:") else None
    is_anonymous = _TOKEN_SCHEME not in configuration.api_key and configuration.cert_file is None

    def authorization() -> str:
        if configuration.refresh_api_key_hook is not None:
            try:
                configuration.refresh_api_key_hook(configuration)
            except Exception as error:
                raise AccessError(f"cannot renew the token: {error}") from error
        # A token file may end in a line feed, which no header may hold.
        scheme, _, token = str(configuration.api_key.get(_TOKEN_SCHEME, "")).strip().partition(" ")
        return f"{scheme.capitalize()} {token.strip()}" if token else ""

    return Endpoint(
        url=url,
        tls=tls,
        server_hostname=configuration.tls_server_name,
        proxy=_proxy(configuration, url),
        authorization=authorization,
        is_anonymous=is_anonymous,
    )


def _tls(configuration: Any) -> ssl.SSLContext:  # noqa: ANN401 (the package's has no types)
    context = ssl.create_default_context(
        cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data
    )
    # Python 3.13 turned it on; cluster CAs often lack the extensions that it asks for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _proxy(configuration: Any, url: str) -> str | None:  # noqa: ANN401 (the package's has no types)
    if not configuration.proxy:
        return None
    rest = import_module("kubernetes.client.rest")
    bypass = rest.should_bypass_proxies(url, configuration.no_proxy or "")
    return None if bypass else str(configuration.proxy)
