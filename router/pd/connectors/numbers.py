"""Numbers that two legs of one pair agree on without telling each other."""

from __future__ import annotations

from hashlib import blake2b


def hex_of(id: str) -> str:
    """32 hex digits, as uuid4().hex, that an id decides."""
    return blake2b(id.encode(), digest_size=16).hexdigest()


def number_of(id: str, index: int = 0) -> int:
    """Evenly out of 0..2^63-1: what an id decides, another one for each index."""
    digest = blake2b(id.encode(), digest_size=8, key=index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") >> 1
