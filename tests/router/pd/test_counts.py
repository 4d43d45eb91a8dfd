"""Whether requests were split, and why not, is counted."""

from __future__ import annotations

from kvroute.router.workers import State
from kvroute.types import Role
from tests.kit import ask

from .kit import bench, right


async def test_each_request_is_counted_once_by_what_became_of_it() -> None:
    async with bench("nixl", 1, 1) as one:
        assert right(await one.ask())
        assert (await one.ask(n=1, echo=True)).status == 200
        for member in one.server.registry.members.values():
            if member.worker.role is Role.PREFILL:
                one.server.registry.set_state(member, State.UNHEALTHY)
        assert right(await one.ask())
        await ask(one.server.url, "/tokenize", {"prompt": "x"})
        counted = one.server._pd.books.pd_metrics.requests.values
        assert counted == {
            ("split", "turn"): 1,
            ("whole", "echo"): 1,
            ("whole", "no_pair"): 1,
            ("whole", "route"): 1,
        }
