"""TLS: certificates that are renewed on disk are taken over without a restart.

A renewed pair is loaded into a context of its own, and new connections use that context once
it is whole; connections that are open keep theirs. A pair that cannot be loaded (half written,
key of another certificate) changes nothing but a count: the last good pair stays in use.

All contexts of ours come from here, save for those to the API server, whose CAs are of another
kind (:mod:`nearkv.kube.credentials`).
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import structlog

from nearkv.errors import CertificateError
from nearkv.handshakes import counting_handshakes

log = structlog.get_logger(__name__)

_Signature = tuple[tuple[int, int, int], ...]
_NOTHING_READ: _Signature = ((-1, -1, -1),)


def _ignore(_outcome: str) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: certificate chain, private key, and the CA that clients must be signed by.

    Without ``client_ca`` clients show no certificate. ``every_client`` False lets those connect
    who show none; whoever serves asks :func:`nearkv.serving.require_client_certificate` then.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    every_client: bool = True

    @property
    def paths(self) -> Sequence[Path]:
        """All files there are."""
        return [path for path in (self.cert, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """PEM files of a client: the CA that servers must be signed by, and what it shows of itself.

    Without ``ca`` the system's CAs count; without ``cert`` and ``key`` nothing is shown. ``name``
    is what servers' certificates must be for, empty where that is the host that is asked.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    name: str = ""

    @property
    def paths(self) -> Sequence[Path]:
        """All files there are."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]


class TlsOptions(TypedDict):
    """What a request of aiohttp takes."""

    ssl: ssl.SSLContext | bool
    server_hostname: str | None


class ReloadingContext(ssl.SSLContext):
    """A server context whose connections begin with whatever context is current.

    asyncio and uvloop ask the context that a server was started with for each connection's
    TLS object, and for nothing else; handing that question on swaps certificate, key and
    client CA in one step, which loading them into a live context would not.
    """

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:  # noqa: ANN401 (handed on as they are)
        """Begin a connection with the current context."""
        return self.current.wrap_bio(*args, **kwargs)


class Certificates:
    """The context to serve with, kept true to its files.

    ``count`` is called with ``reloaded`` or ``failed``, ``count_handshake`` with why a client's
    handshake failed (:class:`nearkv.handshakes.HandshakeFailure`). Raises
    :class:`CertificateError` when the files cannot be loaded at the start.
    """

    def __init__(
        self,
        files: CertificateFiles,
        *,
        count: Callable[[str], None],
        count_handshake: Callable[[str], None] = _ignore,
    ) -> None:
        self._files = files
        self._count = count
        self._connection = counting_handshakes(count_handshake)
        self._seen, missing = _signature(files)
        self.context = ReloadingContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if missing is not None:
                raise missing
            self.context.current = self._load()
        except OSError as error:  # ssl.SSLError is one, too
            raise CertificateError(f"tls: {_explain(error, files)}") from error

    def reload(self) -> None:
        """Take the files over if they have changed and can be used."""
        signature, missing = _signature(self._files)
        if signature == self._seen:
            return
        try:
            if missing is not None:
                raise missing
            loaded = self._load()
        except OSError as error:
            self._seen = signature
            self._count("failed")
            log.error("certificate_not_reloaded", error=_explain(error, self._files))  # noqa: TRY400 (the text says it)
            return
        if signature != _signature(self._files)[0]:
            return  # they changed while they were read: the next call looks again
        self._seen = signature
        self.context.current = loaded
        self._count("reloaded")
        log.info("certificate_reloaded", cert=str(self._files.cert))

    def _load(self) -> ssl.SSLContext:
        loaded = load_context(self._files)
        loaded.sslobject_class = self._connection
        return loaded

    async def watch(self, every_seconds: float) -> None:
        """Look at the files again and again; runs until it is cancelled.

        Polling sees the links that Kubernetes swaps in a mounted secret, on every file system.
        """
        while True:
            await asyncio.sleep(every_seconds)
            self.reload()


class ClientCertificates:
    """What a client connects with, kept true to its files.

    ``count`` is called with ``reloaded`` or ``failed``. Raises :class:`CertificateError` when the
    files cannot be loaded at the start; later on, the last good ones stay in use.
    """

    def __init__(self, files: ClientFiles, *, count: Callable[[str], None] = _ignore) -> None:
        self._files = files
        self._count = count
        self._seen = _NOTHING_READ
        try:
            self._context = load_client_context(files)
        except OSError as error:
            raise CertificateError(f"tls: {_explain(error, files)}") from error
        self._seen, _ = _signature(files)

    @property
    def context(self) -> ssl.SSLContext:
        """The context for a new connection; looks at the files, so ask anew for each."""
        signature, missing = _signature(self._files)
        if signature != self._seen:
            self._seen = signature
            try:
                if missing is not None:
                    raise missing
                self._context = load_client_context(self._files)
            except OSError as error:
                self._count("failed")
                log.error("certificate_not_reloaded", error=_explain(error, self._files))  # noqa: TRY400 (the text says it)
            else:
                self._count("reloaded")
                log.info("certificate_reloaded", files=", ".join(map(str, self._files.paths)))
        return self._context

    @property
    def options(self) -> TlsOptions:
        """What the next request of aiohttp takes; ask anew for each."""
        return {"ssl": self.context, "server_hostname": self._files.name or None}


def tls_options(certificates: ClientCertificates | None) -> TlsOptions:
    """Return what a request takes; without certificates the system's CAs count."""
    return {"ssl": True, "server_hostname": None} if certificates is None else certificates.options


def load_client_context(files: ClientFiles, *, check_host: bool = True) -> ssl.SSLContext:
    """Return a client's context; raises ``OSError`` when its files cannot be used.

    Without ``check_host`` any certificate of the CA will do, whatever it is for.
    """
    context = ssl.create_default_context(cafile=files.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = check_host
    if files.cert is not None:
        # A password prompt on an encrypted key would hang the process.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    return context


def load_context(files: CertificateFiles) -> ssl.SSLContext:
    """Return a server context with these files; raises ``OSError`` when they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # kube-scheduler offers HTTP/2 over TLS, which is not spoken here.
    context.set_alpn_protocols(["http/1.1"])
    # A password prompt on an encrypted key would hang the process.
    context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED if files.every_client else ssl.CERT_OPTIONAL
        context.load_verify_locations(files.client_ca)
    return context


def _signature(files: CertificateFiles | ClientFiles) -> tuple[_Signature, OSError | None]:
    """Tell one state of the files from another without reading them, and whether one is gone."""
    try:
        found = [path.stat() for path in files.paths]
    except OSError as error:
        return (), error
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found), None


def _explain(error: OSError, files: CertificateFiles | ClientFiles) -> str:
    named = ", ".join(map(str, files.paths))
    if isinstance(error, ssl.SSLError):
        return f"{named}: {error.reason or error}"
    return f"{error.filename or named}: {error.strerror}"
