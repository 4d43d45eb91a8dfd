"""Options of the shared state, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

SCHEMES = ("redis", "rediss", "unix")
QUERY_FIELDS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
ACCEPTED = "accepted: redis://host:port/db, rediss://host:port/db, unix:///path/to.sock?db=0"


@dataclass(frozen=True, slots=True, repr=False)
class SharedOptions:
    """Where the shared state lives and what it may take. `ValueError` names the field that cannot be used."""

    url: str
    """redis://, rediss:// (TLS) or unix://, with user and password if need be; query: `QUERY_FIELDS`."""
    password: str | None = None
    """For whoever does not want it in the URL."""
    prefix: str = "kvroute"
    """Of every key; gateways with the same prefix are replicas of one another."""
    timeout_s: float = 1.0
    """Of every call."""
    adopt_workers: bool = True
    """Workers that were added, drained or removed at another replica are so here too."""
    warm_s: float = 300.0
    """How far back a fresh replica reads what was routed."""
    stream_bytes: int = 64 * 2**20
    """What Redis keeps of what was routed, about."""

    def __post_init__(self) -> None:
        self._check_url()
        if not re.fullmatch(r"[!-~]{1,128}", self.prefix):
            raise ValueError(f"prefix: {self.prefix!r}; accepted: 1 to 128 visible ASCII characters")
        if not 0.01 <= self.timeout_s <= 60:
            raise ValueError(f"timeout_s: {self.timeout_s}; accepted: 0.01 to 60")
        if not 0 <= self.warm_s <= 86_400:
            raise ValueError(f"warm_s: {self.warm_s}; accepted: 0 to 86400")
        if not 2**20 <= self.stream_bytes <= 2**34:
            raise ValueError(f"stream_bytes: {self.stream_bytes}; accepted: {2**20} to {2**34}")

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url: {error}; {ACCEPTED}") from None
        if parts.scheme not in SCHEMES:
            raise ValueError(f"url: scheme {parts.scheme or 'none'!r}; {ACCEPTED}")
        if parts.scheme == "unix" and not parts.path.startswith("/"):
            raise ValueError(f"url: a unix socket needs an absolute path; {ACCEPTED}")
        if parts.scheme != "unix" and (not parts.hostname or port == 0):
            raise ValueError(f"url: no {'port' if parts.hostname else 'host'}; {ACCEPTED}")
        if parts.scheme != "unix" and not re.fullmatch(r"(/\d{0,5})?", parts.path):
            raise ValueError(f"url: {parts.path!r} is no database number; {ACCEPTED}")
        if parts.fragment:
            raise ValueError(f"url: a fragment ('#' in a password is %23); {ACCEPTED}")
        query = parse_qs(parts.query, keep_blank_values=True)
        unknown = sorted(set(query) - set(QUERY_FIELDS))
        if unknown:
            raise ValueError(f"url: unknown query {', '.join(unknown)}; accepted: {', '.join(QUERY_FIELDS)}")
        if "db" in query and not re.fullmatch(r"\d{1,5}", query["db"][0]):
            raise ValueError(f"url: db {query['db'][0]!r} is no database number; {ACCEPTED}")
        if parts.password is not None and self.password is not None:
            raise ValueError("password: given in url as well; accepted: one of them")

    @property
    def shown_url(self) -> str:
        """The URL without user and password, for logs."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def __repr__(self) -> str:
        return f"<SharedOptions {self.shown_url} prefix={self.prefix}>"
