"""Keys as packed unsigned 64-bit integers in the machine's byte order: what the indexes store and compare."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def pack_in_python(keys: Sequence[int]) -> bytes:
    """Pack keys; `ValueError` when one does not fit."""
    try:
        return array("Q", keys).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a key must be from 0 to 2**64 - 1: {error}") from error


try:
    from kvroute.conductor._block_index import pack_keys
except ImportError:
    pack_keys = pack_in_python

__all__ = ["pack_in_python", "pack_keys"]
