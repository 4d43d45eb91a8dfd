"""An engine that keeps a record of how it is probed, and can fail each probe by itself."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvroute.router.server import GatewayServer
from kvroute.router.workers import Member
from tests.kit import Engine, Received, Wire


@dataclass
class Probed(Engine):
    """`statuses` are the answers of /health in turn, then `health` again."""

    statuses: Iterable[int] = ()
    cards: list[dict[str, Any]] | None = None
    """Instead of the cards made of `models`."""
    models_status: int = 200
    server_info: dict[str, Any] | None = None
    seen: list[Received] = field(default_factory=list)
    _turns: Iterator[int] | None = None

    def targets(self, target: str) -> list[Received]:
        return [probe for probe in self.seen if probe.target == target]

    async def _answer_probe(self, request: Received, wire: Wire) -> bool:
        if request.method == "GET":
            self.seen.append(request)
        if request.target == "/health":
            self._turns = self._turns or itertools.chain(self.statuses)
            turn = next(self._turns, None)
            if turn is not None:
                await wire.answer(turn, b"")
                return True
        if request.target == "/v1/models" and (self.cards is not None or self.models_status != 200):
            body = json.dumps({"object": "list", "data": self.cards}).encode()
            await wire.answer(self.models_status, body)
            return True
        if request.target == "/server_info?config_format=json" and self.server_info is not None:
            await wire.answer(200, json.dumps(self.server_info).encode())
            return True
        return await super()._answer_probe(request, wire)


class Held:
    """A script that keeps its requests open until `release`."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.count = 0

    async def __call__(self, _request: Received, wire: Wire) -> None:
        self.count += 1
        await self.released.wait()
        await wire.answer(200, b'{"ok":true}')

    def release(self) -> None:
        self.released.set()


def member_of(server: GatewayServer, engine: Engine) -> Member:
    """The incarnation of `engine` that is not leaving."""
    return next(
        m for m in server.registry.members.values() if m.endpoint.url == engine.url and not m.leaves_when_idle
    )
