"""Worker URLs: the one place that reads and writes them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
ACCEPTED = "accepted: http://host:port, https://host:port, http://[ipv6]:port, unix:///path/to.sock"


class EndpointError(ValueError):
    """A worker URL cannot be used; the message says what is accepted."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens."""

    url: str
    """Canonical form: lower-case scheme and host, port spelled out, no trailing slash."""
    host: str
    port: int
    unix_path: str | None
    tls: bool
    base_path: str
    """Put before every request target; "" or "/prefix"."""
    authority: str
    """Value of the Host header."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raise EndpointError for anything that is not a plain http, https or unix URL."""
        if not re.fullmatch(r"[\x21-\x7e]+", url):
            raise EndpointError(f"worker url {url!r} may only have visible ASCII characters; {ACCEPTED}")
        if url.startswith("unix:"):
            return cls._parse_unix(url)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise EndpointError(f"worker url {url!r}: {error}; {ACCEPTED}") from None
        if parts.scheme not in DEFAULT_PORTS:
            raise EndpointError(f"worker url {url!r} has scheme {parts.scheme or 'none'!r}; {ACCEPTED}")
        if "@" in parts.netloc:
            raise EndpointError(f"worker url {url!r} contains '@' (a user or a rank); {ACCEPTED}")
        if parts.query or parts.fragment:
            raise EndpointError(f"worker url {url!r} has a query or fragment; {ACCEPTED}")
        host = parts.hostname
        if not host:
            raise EndpointError(f"worker url {url!r} names no host; {ACCEPTED}")
        if not parts.netloc.startswith("[") and parts.netloc.count(":") > 1:
            raise EndpointError(f"worker url {url!r}: an IPv6 address stands in brackets; {ACCEPTED}")
        port = DEFAULT_PORTS[parts.scheme] if port is None else port
        if port == 0:
            raise EndpointError(f"worker url {url!r} has port 0; {ACCEPTED}")
        authority = join_host_port(host, port)
        base_path = parts.path.rstrip("/")
        if base_path.endswith("/v1"):
            raise EndpointError(
                f"worker url {url!r} ends in /v1; give the server's root, without it; {ACCEPTED}"
            )
        return cls(
            url=f"{parts.scheme}://{authority}{base_path}",
            host=host,
            port=port,
            unix_path=None,
            tls=parts.scheme == "https",
            base_path=base_path,
            authority=authority,
        )

    @classmethod
    def _parse_unix(cls, url: str) -> Endpoint:
        path = unquote(url.removeprefix("unix:").removeprefix("//"))
        if not path.startswith("/") or "\x00" in path:
            raise EndpointError(f"worker url {url!r} needs an absolute socket path; {ACCEPTED}")
        return cls(f"unix://{quote(path)}", "localhost", 0, path, False, "", "localhost")


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets exactly once and in its one short form."""
    bare = host.strip("[]")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return f"{host}:{port}"
    return f"[{address}]:{port}" if address.version == 6 else f"{host}:{port}"


def http_origin(host: str, port: int) -> str:
    """`http://host:port`."""
    return f"http://{join_host_port(host, port)}"
