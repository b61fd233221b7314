"""A host and a port as one value, for settings and for servers."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_HIGHEST_PORT = 65535
_BRACKETED = re.compile(r"\[(?P<host>[0-9A-Fa-f:.%\w]+)\]:(?P<port>\d{1,5})", re.ASCII)
_PLAIN = re.compile(r"(?P<host>[^\s:\[\]/@]+):(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port; port 0 asks the operating system for a free one.

    The text form is ``host:port``, with IPv6 hosts in brackets. Settings take and print
    the text form, so the class works as a field type.
    """

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port``, an IPv6 host in brackets, as a URL needs it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a plain HTTP base URL, without a slash at its end."""
        return f"http://{self}"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: object, _handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        """Let settings hold an ``Address``: parsed from text, printed as text."""
        # Here and not at the top: an Address is useful without pydantic.
        from pydantic_core import core_schema  # noqa: PLC0415 - see above

        return core_schema.no_info_plain_validator_function(
            cls._validated,
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: "CoreSchema", _handler: "GetJsonSchemaHandler"
    ) -> dict[str, Any]:
        """Describe the text form in the JSON schema of the settings."""
        return {"type": "string", "examples": ["0.0.0.0:8080", "[::1]:8080"]}

    @classmethod
    def _validated(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise ValueError("an address is text of the form host:port")  # noqa: TRY004 - pydantic collects ValueError only
        address = parse_address(value)
        return cls(address.host, address.port)


def parse_address(text: str) -> Address:
    """Read ``host:port`` or ``[IPv6]:port``; port 0 is allowed.

    Raises ``ValueError`` when there is no port, when the port is above 65535, or when
    an IPv6 host lacks its brackets (without them, the port is ambiguous).
    """
    match = _BRACKETED.fullmatch(text) or _PLAIN.fullmatch(text)
    if match is None:
        raise ValueError(f"not an address: {text!r}; write host:port or [IPv6]:port")
    port = int(match["port"])
    if port > _HIGHEST_PORT:
        raise ValueError(f"port {port} in {text!r} is above {_HIGHEST_PORT}")
    return Address(match["host"], port)
