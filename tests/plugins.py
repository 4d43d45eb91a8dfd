"""Third-party classes, registered for a test beside the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pytest

from kvroute import plugins


def third_party(
    monkeypatch: pytest.MonkeyPatch, group: str, names: Mapping[str, Any]
) -> Callable[[str, str], None]:
    """Registers one of `names`, a module's, under a name of `group`."""
    module = ModuleType("third_party")
    module.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "third_party", module)
    extra: list[EntryPoint] = []
    real = list(entry_points(group=group))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [*real, *extra])

    def register(name: str, value: str) -> None:
        extra.append(EntryPoint(name, f"third_party:{value}", group))

    return register
