from collections.abc import Sequence

from kvroute.conductor.block_index import BlockIndex as BlockIndex

def pack_keys(keys: Sequence[int]) -> bytes: ...
