from __future__ import annotations

import asyncio

import pytest

from kvroute.router.sweeper import NEVER, Sweeper
from tests.kit import until
from tests.loadtests.virtual_time import run_virtually


class Item:
    def __init__(self, sweeper: Sweeper, in_s: float) -> None:
        self.deadline_s = asyncio.get_running_loop().time() + in_s
        self.due_s = self.deadline_s
        self.calls = 0
        self.late_s = 0.0
        sweeper.watch(self)

    def on_deadline(self) -> None:
        self.calls += 1
        self.late_s = asyncio.get_running_loop().time() - self.due_s


def test_deadlines_are_kept_within_a_tick_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sweeper = Sweeper(asyncio.get_running_loop(), tick_s=0.02)
        soon, later, never = Item(sweeper, 0.01), Item(sweeper, 0.1), Item(sweeper, NEVER)
        await asyncio.sleep(0.2)
        assert (soon.calls, later.calls, never.calls, len(sweeper)) == (1, 1, 0, 3)
        assert 0 <= soon.late_s <= 0.02
        assert 0 <= later.late_s <= 0.021  # it rounds
        assert soon.deadline_s == NEVER
        for item in (soon, later, never):
            sweeper.forget(item)

    run_virtually(main(), monkeypatch, "kvroute.router.sweeper")


async def test_a_deadline_may_move_either_way() -> None:
    sweeper = Sweeper(asyncio.get_running_loop(), tick_s=0.01)
    put_off, brought_forward = Item(sweeper, 0.05), Item(sweeper, 60)
    put_off.deadline_s = NEVER
    brought_forward.deadline_s = asyncio.get_running_loop().time()
    await until(lambda: brought_forward.calls == 1)
    await asyncio.sleep(0.1)
    assert put_off.calls == 0


async def test_the_forgotten_are_not_called_and_the_timer_rests() -> None:
    sweeper = Sweeper(asyncio.get_running_loop(), tick_s=0.01)
    item = Item(sweeper, 0.02)
    sweeper.forget(item)
    sweeper.forget(item)
    await until(lambda: sweeper._timer is None)
    assert (item.calls, len(sweeper)) == (0, 0)
    again = Item(sweeper, 0.0)
    await until(lambda: again.calls == 1)


async def test_what_a_deadline_does_may_change_who_is_watched() -> None:
    sweeper = Sweeper(asyncio.get_running_loop(), tick_s=0.01)

    class Replaced(Item):
        def on_deadline(self) -> None:
            super().on_deadline()
            sweeper.forget(self)
            items.append(Item(sweeper, 0.0))

    items: list[Item] = [Replaced(sweeper, 0.0), Replaced(sweeper, 0.0)]
    await until(lambda: len(items) == 4 and all(item.calls for item in items))
    assert len(sweeper) == 2
