"""The Dockerfile as data: stages of instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@dataclass(slots=True)
class Stage:
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [arguments for instruction, arguments in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        """The one in force."""
        return self.all(name)[-1]

    def exec_form(self, name: str) -> list[str]:
        """A JSON array, which needs no shell; the shell form is an error."""
        value: list[str] = json.loads(self.last(name))
        return value

    def copied_from_context(self) -> list[str]:
        return [s for line in self.all("COPY") if not line.startswith("--from") for s in line.split()[:-1]]


def stages() -> list[Stage]:
    """Comments dropped, continued lines joined; what stands before the first FROM is left out."""
    lines = (line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            found.append(Stage(arguments))
        elif found and name:
            found[-1].instructions.append((name, arguments))
    return found
