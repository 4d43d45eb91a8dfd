"""What an event's extra keys mean: the adapter, the salt, and the media of each block.

vLLM lists them by block and without tags, in this order: the adapter's name (on every block, also in
`lora_name`), pairs (content id, offset) of media, the cache salt (on the first block of a prompt only),
digests of prompt embeddings. Older builds list bare content ids for media.

What cannot be told apart is read so that it can only cause a miss:
* Bare texts on a first block: the last is the salt, any before it are content ids. A lone bare content id of
  an older build is then taken for a salt, which no request has.
* An adapter known by number alone gets a namespace of its own, which no request has.
* Anything else, embeddings included, becomes a content id that no request has.
Engines that list no extra keys at all do not show their salts: such blocks count as unsalted, and the
engine's reported `cached_tokens` tell that they are not.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvroute.conductor.events.batches import Stored
from kvroute.conductor.keys import Namespace, pack_extras

ROOTS = 1024
"""Remembered; salts may be many."""


class Identity(Struct, frozen=True, gc=False):
    """What a stored chain's keys depend on besides its tokens."""

    adapter: str | None = None
    salt: str | None = None
    """Only known for a chain that begins a prompt; later blocks have it through their parent."""
    extras: dict[int, bytes] = {}
    """By block of the event, as `chain_keys` takes them."""
    guessed: int = 0
    """Parts that no request can have."""


PLAIN = Identity()


def identify(event: Stored) -> Identity:
    """Read the adapter by its field, and the rest by place and kind."""
    if event.lora_name is None and event.lora_id is None and event.extra_keys is None:
        return PLAIN
    adapter, guessed = event.lora_name, 0
    if adapter is None and event.lora_id is not None:
        adapter, guessed = f"\0number {event.lora_id}", 1
    salt: str | None = None
    extras: dict[int, bytes] = {}
    for index, listed in enumerate(event.extra_keys or ()):
        rest = list(listed or ())
        if rest and rest[0] == event.lora_name:
            del rest[0]
        if index == 0 and event.parent is None:
            salt = _take_salt(rest)
        if rest:
            content = [_content_id(item) for item in rest]
            guessed += sum(unknown for _, unknown in content)
            extras[index] = pack_extras(name for name, _ in content)
    return Identity(adapter, salt, extras, guessed)


class Roots:
    """Where chains begin, by adapter and salt; what the events do not say, the namespace does."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._known: OrderedDict[tuple[str | None, str | None], int] = OrderedDict()

    def of(self, identity: Identity) -> int:
        """The root of a chain that begins a prompt."""
        name = identity.adapter, identity.salt
        root = self._known.get(name)
        if root is None:
            if len(self._known) >= ROOTS:
                self._known.popitem(last=False)
            said = {"adapter": identity.adapter, "cache_salt": identity.salt}
            said = {part: value for part, value in said.items() if value is not None}
            root = self._known[name] = replace(self._namespace, **said).root("ids")
        return root


def _take_salt(rest: list[Any]) -> str | None:
    for place in range(len(rest) - 1, -1, -1):
        if isinstance(rest[place], str):
            salt: str = rest.pop(place)
            return salt
    return None


def _content_id(item: Any) -> tuple[str, bool]:
    """(content id, whether it is one that no request can have)"""
    if isinstance(item, tuple) and item and isinstance(item[0], str):
        return item[0], False
    if isinstance(item, str):
        return item, False
    return f"\0other {item!r}", True
