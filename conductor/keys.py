"""What equal prefixes are called: 64-bit routing keys, and SHA-256 object keys for stores.

    root    = Namespace(...).root(domain)
    key[i]  = xxh3_64(block i [+ its extras], seed = key[i - 1])        key[-1] = root

Equal keys mean equal prefixes in equal namespaces. A collision of routing keys costs time, never
correctness: the engine checks its own cache. Who reads bytes by name needs more, and takes object keys:

    digest[i]  = SHA-256(CBOR([digest[i - 1], block i, its extras or null]))
    object key = SHA-256(CBOR({namespace, digest[i], shard, layout version}))

Both are the same in every process, on every machine and in every version that keeps `VERSION` and
`OBJECT_VERSION`. KEYS.md beside this file is the specification, with the vectors that the tests pin.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from struct import Struct as Layout
from typing import Any

import cbor2
from msgspec import Struct
from msgspec.structs import asdict, astuple
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvroute.types import KeyMode, PromptKeys

VERSION = b"kvroute/routing-key/1"
OBJECT_VERSION = 1
BYTES_PER_TOKEN = 4
"""English text is near 4 bytes a token; only proportions matter to whoever compares prompts and matches."""

TOKEN_ID_BYTES = 4
DIGEST_BYTES = 32
# One byte and sixteen: no block of whole token ids is as long as a block with its extras.
_EXTRAS_TAG = b"\xff"


class Namespace(Struct, frozen=True, gc=False, kw_only=True):
    """What must be equal before the KV of equal tokens can be: every field that changes what is computed.

    None is "not said", unlike the empty string or any other value. Sampling settings (temperature, top_p,
    max_tokens) change no KV and have no place here. A salt or a group separates; it authorises nothing.
    """

    model: str | None = None
    """The base model's name; an adapter's goes into `adapter`."""
    adapter: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    """A second salt that some engines take beside the first."""
    architecture: str | None = None
    revision: str | None = None
    """Of the weights: an update under the same name changes the KV."""
    tokenizer: str | None = None
    """Name and version."""
    chat_template: str | None = None
    """Version, or a digest of the text."""
    positions: str | None = None
    """Positional encoding: RoPE base, scaling, factor."""
    attention: str | None = None
    """Kind and configuration: full, sliding window and its length, latent."""
    adapter_version: str | None = None
    kv_dtype: str | None = None
    kv_scales: str | None = None
    """Quantisation scales, or a digest of them."""
    kv_layout: str | None = None
    """How the engine arranges a block, with its version."""
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    sharing_group: str | None = None
    """The tenant or group within which prefixes may be shared."""

    def root(self, domain: str) -> int:
        """64-bit start of the chain of routing keys.

        `domain` says what the blocks are made of: "ids" is token ids, else a kind of canonical prompt bytes.
        Every given field goes in with its own tag and its length, so an adapter named "x" is not a salt "x",
        and no fields can run into each other.
        """
        packed = [VERSION, *_tagged(b"d", domain)]
        for tag, value in zip(_TAGS, astuple(self), strict=True):
            if value is not None:
                packed += _tagged(tag, value)
        return xxh3_64_intdigest(b"".join(packed))

    def canonical(self) -> dict[str, str | int]:
        """The given fields by name, as they enter a canonical encoding.

        A field that is None is left out, so that a field added later changes no key that exists.
        Raises `ValueError` when a text has no UTF-8 (a lone surrogate).
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in given.items():
            try:
                str(value).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"namespace {name} must be text that UTF-8 can encode: {error}") from None
        return given


# In the order of the fields. A tag once given to a field stays its own.
_TAGS = (b"m", b"a", b"s", b"x", b"A", b"r", b"t", b"c", b"p", b"n", b"v", b"k", b"q", b"l", b"T", b"P", b"g")


def byte_keys(prompt: bytes, root: int, chunk_bytes: int) -> PromptKeys:
    """Keys of the full chunks of canonical prompt bytes; the tail has none, so a longer prompt extends it.

    Token counts are estimates at `BYTES_PER_TOKEN`.
    """
    return PromptKeys(
        KeyMode.BYTES,
        _chain(prompt, root, chunk_bytes),
        block_tokens=max(1, chunk_bytes // BYTES_PER_TOKEN),
        prompt_tokens=-(-len(prompt) // BYTES_PER_TOKEN),
    )


def token_keys(
    ids: Sequence[int] | bytes, root: int, block_tokens: int, extras: Mapping[int, bytes] | None = None
) -> PromptKeys:
    """Keys of the full blocks of exact token ids, given as integers or as packed little-endian uint32.

    `extras` is what a block holds besides its tokens (`pack_extras`), by index of the block.
    Raises `ValueError` when an id is not an unsigned 32-bit integer or packed ids end within one.
    """
    packed = ids if isinstance(ids, bytes) else pack_ids(ids)
    return PromptKeys(
        KeyMode.TOKENS,
        chain_keys(packed, root, block_tokens, extras),
        block_tokens=block_tokens,
        prompt_tokens=len(packed) // TOKEN_ID_BYTES,
    )


def chain_keys(
    packed_ids: bytes, parent_key: int, block_tokens: int, extras: Mapping[int, bytes] | None = None
) -> list[int]:
    """Keys of the full blocks of packed ids that follow the block of `parent_key` (or a root).

    `extras` counts blocks from the first of these. Raises `ValueError` as `token_keys` does.
    """
    if len(packed_ids) % TOKEN_ID_BYTES:
        raise ValueError(f"packed token ids are {len(packed_ids)} bytes, not a multiple of {TOKEN_ID_BYTES}")
    block_bytes = block_tokens * TOKEN_ID_BYTES
    if not extras:
        return _chain(packed_ids, parent_key, block_bytes)
    key, keys = parent_key, []
    for index, block in enumerate(_blocks(packed_ids, block_bytes)):
        extra = extras.get(index)
        data = block if extra is None else block + _EXTRAS_TAG + xxh3_128_digest(extra)
        keys.append(key := xxh3_64_intdigest(data, key))
    return keys


def pack_extras(content_ids: Iterable[str]) -> bytes:
    """What a block holds besides its tokens, as `extras` wants it: the ids of its images or sounds, in order.

    An id must stand for the content and its preprocessing. Each goes in with its length, so that ids cannot
    run into each other.
    """
    packed = bytearray()
    for content_id in content_ids:
        packed += b"".join(_tagged(b"c", content_id))
    return bytes(packed)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; `ValueError` when one does not fit."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def prefix_digests(
    ids: Sequence[int] | bytes,
    namespace: Namespace,
    block_tokens: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """SHA-256 digests (32 bytes) of the prefixes that end with each full block; arguments as `token_keys`."""
    packed = ids if isinstance(ids, bytes) else pack_ids(ids)
    if len(packed) % TOKEN_ID_BYTES:
        raise ValueError(f"packed token ids are {len(packed)} bytes, not a multiple of {TOKEN_ID_BYTES}")
    extras = extras or {}
    digest = _canonical_digest(["kvroute/prefix", OBJECT_VERSION, namespace.canonical()])
    return [
        digest := _canonical_digest([digest, block, extras.get(index)])
        for index, block in enumerate(_blocks(packed, block_tokens * TOKEN_ID_BYTES))
    ]


def object_key(namespace: Namespace, prefix_digest: bytes, shard: int, layout_version: int) -> str:
    """Name of one shard of one block in a store: 64 lower-case hexadecimal digits.

    `prefix_digest` comes from `prefix_digests` in the same namespace; `shard` is the place in the order
    of the namespace's parallelism, pipeline rank x tensor parallel size + tensor rank; `layout_version` is
    that of the object's bytes. Raises `ValueError` when one cannot be.
    """
    if len(prefix_digest) != DIGEST_BYTES:
        raise ValueError(f"prefix_digest must be {DIGEST_BYTES} bytes, got {len(prefix_digest)}")
    for name, value in (("shard", shard), ("layout_version", layout_version)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be from 0 to 2**64 - 1, got {value}")
    return _canonical_digest(
        {
            "kind": "kvroute/object",
            "version": OBJECT_VERSION,
            "namespace": namespace.canonical(),
            "prefix": prefix_digest,
            "shard": shard,
            "layout_version": layout_version,
        }
    ).hex()


def _canonical_digest(value: Any) -> bytes:
    return sha256(cbor2.dumps(value, canonical=True)).digest()


def _tagged(tag: bytes, value: str | int) -> tuple[bytes, bytes, bytes]:
    data = str(value).encode("utf-8", "surrogatepass")
    return tag, len(data).to_bytes(8, "little"), data


@lru_cache(maxsize=64)
def _layout(block_bytes: int) -> Layout:
    if block_bytes < 1:
        raise ValueError(f"a block must be at least 1 byte, not {block_bytes}")
    return Layout(f"{block_bytes}s")


def _blocks(data: bytes, block_bytes: int) -> Iterable[bytes]:
    layout = _layout(block_bytes)
    full = memoryview(data)[: len(data) - len(data) % block_bytes]
    return (block for (block,) in layout.iter_unpack(full))


def _chain(data: bytes, root: int, block_bytes: int) -> list[int]:
    layout = _layout(block_bytes)
    full = memoryview(data)[: len(data) - len(data) % block_bytes]
    key = root
    return [key := xxh3_64_intdigest(block, key) for (block,) in layout.iter_unpack(full)]
