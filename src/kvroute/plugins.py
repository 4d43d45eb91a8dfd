"""Classes that anybody may add by entry point: built-in and third-party ones load by the same path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugins:
    """Those of one kind. What cannot be used raises `error`, whose message names it and says why."""

    kind: str
    """As messages call it."""
    group: str
    """Of entry points."""
    error: type[Exception]

    def names(self) -> list[str]:
        """Those that `load` knows, sorted."""
        return sorted({entry.name for entry in entry_points(group=self.group)})

    def load(self, name: str) -> tuple[type[Any], str]:
        """The class registered as `name`, and what a message calls it."""
        entry = self._find(name)
        what = f"{self.kind} {name!r} ({entry.value})"
        try:
            loaded = entry.load()
        except Exception as error:
            raise self.error(f"{what} does not import: {type(error).__name__}: {error}") from error
        if not isinstance(loaded, type):
            raise self.error(f"{what} is not a class")
        return loaded, what

    def make(self, name: str, loaded: type[Any], argument: Any) -> Any:
        """An instance of a class that was loaded as `name`."""
        try:
            return loaded(argument)
        except Exception as error:
            raise self.error(
                f"{self.kind} {name!r} did not start: {type(error).__name__}: {error}"
            ) from error

    def _find(self, name: str) -> EntryPoint:
        by_value = {entry.value: entry for entry in entry_points(group=self.group) if entry.name == name}
        if not by_value:
            raise self.error(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        if len(by_value) > 1:
            found = ", ".join(sorted(by_value))
            raise self.error(f"{self.kind} {name!r} is registered more than once: {found}")
        return next(iter(by_value.values()))
