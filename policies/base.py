"""The contract every policy, built in or third party, fulfils."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from kvroute.types import Decision, Fleet, Hold, Priced, Rejection, RequestView


class Policy(Protocol):
    """Chooses a worker for one request.

    A class registered in the entry-point group `kvroute.policies`. `Options` is a frozen dataclass whose
    fields are the policy's options and their defaults; the class is called with one instance of it.

    `decide` is synchronous and quick, never awaits, reads no socket and no wall clock (`fleet.now_s` is
    the time), and only reads what it is given: `fleet.loads` are live objects that belong to the gateway.
    It may keep state of its own (a counter, a seeded random source); it is called from one thread.
    `fleet.workers` is never empty and holds only workers that may take the request; the answer must name
    one of them. `Hold` is accepted only where `fleet.may_hold`; the request then waits in the gateway, and is
    decided on again when a worker frees, at the latest after the gateway's limit.

    A class may say `needs_active_keys = True` to have `active_keys` of the loads filled in, and
    `needs_seconds = True` to have their prefill seconds, and paces that answers have corrected; what nobody
    needs costs nothing.

    Where requests can be split, `chooses_pairs = True` shows a policy all workers and the links between them
    (`fleet.pd_links`), and its candidate names both. Others are shown the prefill workers alone, and the
    decode worker is the one with the fewest KV tokens promised; in the simulator, where the policy has a
    `choose_decode(request, fleet)`, that is asked for the index of one, out of a fleet of decode workers.

    A policy that `Orders` has requests that come in the same turn of the event loop decided on together.

    A raised exception or an answer that is none is counted, and the request goes to the least loaded worker
    instead. A decision that overruns the gateway's time budget is counted and kept; after five in a row the
    policy is set aside for a thousand decisions.
    """

    Options: ClassVar[type[Any]]
    needs_prefix: ClassVar[bool]
    """True to have `fleet.matches` and `fleet.held_blocks` filled in."""

    def decide(self, request: RequestView, fleet: Fleet) -> Decision | Hold | Rejection: ...


@runtime_checkable
class Prices(Protocol):
    """A policy that can say what every candidate would cost, in seconds; same rules as `decide`.

    It can be copied (`copy.deepcopy`): a dry run decides on a copy.
    """

    def price(self, request: RequestView, fleet: Fleet) -> Sequence[Priced]:
        """All candidates, cheapest first; decides nothing and changes nothing."""
        ...


@runtime_checkable
class Orders(Protocol):
    """A policy that has a say in who goes first of those that come together; same rules as `decide`."""

    def order(self, request: RequestView, fleet: Fleet) -> tuple[int, ...]:
        """Of those as urgent as each other the lowest goes first. `fleet` is as before any was placed."""
        ...
