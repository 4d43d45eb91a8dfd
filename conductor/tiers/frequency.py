"""How often keys were seen lately, in little memory: a count-min sketch that ages."""

from __future__ import annotations

from kvroute.conductor.tiers.base import count_at_least

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MASK = 2**64 - 1
_HALVES = bytes(value // 2 for value in range(256))


class FrequencySketch:
    """Counts never too low since the last aging, rarely too high; one byte each, four rows.

    After `sample` additions all counts are halved, so that yesterday's heat fades.
    """

    def __init__(self, entries: int) -> None:
        """`entries` is how many keys it should tell apart; takes 4 to 8 bytes for each."""
        count_at_least("entries", entries, 1)
        bits = max(4, (entries - 1).bit_length())
        self._shift = 64 - bits
        self._rows = [bytearray(1 << bits) for _ in _MULTIPLIERS]
        self._sample = 10 << bits
        self._additions = 0

    def add(self, key: int) -> None:
        """Count one more, up to 255."""
        places = [(key * multiplier & _MASK) >> self._shift for multiplier in _MULTIPLIERS]
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < 255:
            # Only the lowest counts rise: what others added to the rest is no part of this key's count.
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._additions += 1
        if self._additions >= self._sample:
            self._additions //= 2
            self._rows = [row.translate(_HALVES) for row in self._rows]

    def count(self, key: int) -> int:
        """The estimate, 0..255."""
        return min(
            row[(key * multiplier & _MASK) >> self._shift]
            for row, multiplier in zip(self._rows, _MULTIPLIERS, strict=True)
        )
