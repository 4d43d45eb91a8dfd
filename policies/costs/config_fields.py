"""Reading a Hugging Face config.json: every field by name, and a named error for each that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_SIZE = 10_000_000
"""Of any dimension, count or window. Larger is a typing error or an attack on this process's memory."""
MAX_LAYERS = 4096


class Fields:
    """A config (or a nested part of one) with the family's defaults. Only what is asked for is looked at.

    A field that is null is not given, and a default does not stand in for it: Mistral 7B v0.3 says null to be
    rid of the window that its family has.
    """

    def __init__(
        self, config: Mapping[str, Any], path: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self._config = config
        self._path = path
        self._defaults = defaults or {}

    def get(self, *names: str) -> Any:
        """The first of `names` that is given; if the config has none of them, the default; or None."""
        has_any = any(name in self._config for name in names)
        source = self._config if has_any else self._defaults
        return next((source[name] for name in names if source.get(name) is not None), None)

    def size(self, *names: str, least: int = 1) -> int:
        """A required whole number from `least` to MAX_SIZE, under the first of `names` that is given."""
        value = self.get(*names)
        if value is None:
            raise ValueError(
                f"{self._named(names[0])}: missing; a whole number of {least} or more is expected"
            )
        return self._whole(names[0], value, least)

    def size_or(self, default: int, *names: str) -> int:
        value = self.get(*names)
        return default if value is None else self._whole(names[0], value, 1)

    def flag(self, name: str) -> bool:
        """False if not given."""
        value = self.get(name)
        if value not in (None, True, False):
            raise ValueError(f"{self._named(name)}: {value!r} is neither true nor false")
        return bool(value)

    def layers(self) -> int:
        layers = self.size("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if layers > MAX_LAYERS:
            raise ValueError(
                f"{self._named('num_hidden_layers')}: {layers} is too many; at most {MAX_LAYERS} are expected"
            )
        return layers

    def per_layer(self, name: str, layers: int) -> Sequence[Any] | None:
        """A list with an entry for every layer, or None if not given."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            found = f"{len(value)} entries" if isinstance(value, list) else repr(value)[:60]
            raise ValueError(f"{self._named(name)}: {found}; a list of {layers}, one per layer, is expected")
        return value

    def indices(self, name: str, layers: int, *, first: int = 0) -> frozenset[int]:
        """Numbers of layers, counted from `first` in the file and from 0 here. Required."""
        value = self.get(name)
        numbers = range(first, first + layers)
        if not isinstance(value, list) or not all(isinstance(n, int) and n in numbers for n in value):
            found = "missing" if value is None else repr(value)[:60]
            raise ValueError(
                f"{self._named(name)}: {found}; "
                f"a list of layer numbers from {first} to {numbers[-1]} is expected"
            )
        return frozenset(n - first for n in value)

    def nested(self, name: str) -> Fields:
        value = self.get(name)
        if not isinstance(value, Mapping):
            found = "missing" if value is None else f"{value!r} is no object"
            raise ValueError(f"{self._named(name)}: {found}; a JSON object is expected")
        return Fields(value, f"{self._named(name)}.")

    def wrong(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self._named(name)}: {problem}")

    def _named(self, name: str) -> str:
        return f"{self._path}{name}"

    def _whole(self, name: str, value: Any, least: int) -> int:
        # JSON has one kind of number; 4096.0 is a size, 4096.5 and true are not.
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(whole, bool) or not isinstance(whole, int) or not least <= whole <= MAX_SIZE:
            raise ValueError(
                f"{self._named(name)}: {value!r} is not usable; "
                f"a whole number from {least} to {MAX_SIZE} is expected"
            )
        return whole
