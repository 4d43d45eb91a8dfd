"""SGLang's disaggregation, both at once: a room joins the two requests, and both end after the KV has moved.

The prefill engine computes nothing before the decode engine has come to the room, and says nothing before
its KV is there; it always generates one token. The bootstrap server of a prefill engine is at its HTTP port,
which `disaggregation_bootstrap_port` of /server_info says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.loadtests.mock_engine.pd.base import Fetch, PdSide
from kvroute.loadtests.mock_engine.pd.fields import PdFields, for_each, rooms_for_each
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.wire import ApiError, rejected
from kvroute.types import Role

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.dialects.base import Call
    from kvroute.loadtests.mock_engine.engine import MockEngine


@dataclass(slots=True, eq=False)
class Room:
    """At a prefill engine: who has come."""

    prefill: Sequence | None = None
    wait: Fetch | None = None
    """The prefill request's own, for the time it may wait."""
    decode: Fetch | None = None
    is_running: bool = False
    """The prompt was given to the scheduler."""


class SGLang(PdSide):
    """Of the prefill or the decode role; without one it takes requests whole and heeds no room."""

    def __init__(self, engine: MockEngine) -> None:
        super().__init__(engine)
        self._rooms: dict[Any, Room] = {}

    def admit(self, call: Call, fields: PdFields) -> None:
        if self.role is Role.BOTH:
            return
        rooms = rooms_for_each(fields.room, len(call.parts))
        spread = (for_each(value, len(call.parts)) for value in (fields.host, fields.port))
        if rooms is None or None in spread:
            raise rejected("bootstrap_host, bootstrap_port and bootstrap_room must match the prompts.")
        if not all(type(room) is int and 0 <= room < 2**63 for room in rooms):
            raise rejected("Invalid request: Disaggregated request received without bootstrap room id.")
        if self.role is Role.PREFILL:
            for part in call.parts:
                part.output_tokens = part.kv_output_tokens = 1
                part.finish_reason = "length"
            call.output_tokens = len(call.parts)

    def begin(self, answer: TokenAnswer) -> None:
        answer.is_blocked = self.role is Role.PREFILL

    def queue(self, answer: TokenAnswer, index: int, sequence: Sequence) -> bool:
        if self.role is Role.BOTH:
            return True
        rooms = rooms_for_each(answer.pd.room, len(answer.call.parts)) or []
        fetch = Fetch(answer, index, rooms[index])
        answer.fetches.append(fetch)
        if self.role is Role.DECODE:
            self.expect(sequence, fetch)
            return True
        self._enter(fetch, sequence)
        return False

    # The prefill engine.

    def _enter(self, wait: Fetch, sequence: Sequence) -> None:
        """A prefill request comes to its room."""
        self.after(wait, self.engine.options.kv_wait_s, self._gave_up)
        room = self._rooms.setdefault(wait.id, Room())
        if room.prefill is not None:
            self.books.note("repeated", wait.id)
            return
        sequence.hold = True
        room.prefill, room.wait = sequence, wait
        self._advance(room)

    def join(self, fetch: Fetch) -> None:
        """A decode request comes to a room here."""
        room = self._rooms.setdefault(fetch.id, Room())
        if room.decode is not None:
            self.books.note("repeated", fetch.id)
            return
        room.decode = fetch
        self._advance(room)

    def prefilled(self, sequence: Sequence) -> None:
        answer, index = sequence.payload
        blocks = -(-sequence.prompt_tokens // self.engine.options.block_size_tokens)
        id = answer.fetches[index].id
        self.holds.add(str(id), sequence, blocks, lease_s=None, delay_s=answer.faults.handoff_delay)
        self._advance(self._rooms[id])

    def _advance(self, room: Room) -> None:
        """Compute once both are here, and send once that is done."""
        if room.prefill is None or room.decode is None:
            return
        if not room.is_running:
            room.is_running = True
            self.engine.driver.add(room.prefill)
        elif (hold := self.holds.of(room.prefill)) is not None:
            hold.claims = 1
            fetch = room.decode
            fetch.hold = hold
            side = fetch.answer.engine.pd
            side.after(fetch, side.transfer_s(fetch, hold), self._moved)

    def _moved(self, fetch: Fetch) -> None:
        """The KV is at the decode engine, and both go on, if the prefill engine still was there."""
        hold, room, side = fetch.hold, self._rooms.get(fetch.id), fetch.answer.engine.pd
        if hold is None or room is None or room.decode is not fetch:
            side.after(fetch, self.engine.options.kv_wait_s, self._gave_up)
            return
        del self._rooms[fetch.id]
        wrong = "poisoned" if hold.is_wrong else None
        if hold.tokens != fetch.part.tokens:
            wrong = "foreign"
        self.holds.free(hold, "pulled")
        side.received(fetch, wrong)
        if room.wait is not None:
            self.close(room.wait)
            answer = room.wait.answer
            if len(answer.fetches) == len(answer.call.parts) and all(one.is_over for one in answer.fetches):
                answer.unblock()

    # The decode engine.

    def fetch(self, sequence: Sequence) -> None:
        fetch = self._fetches[sequence]
        fields, prompts = fetch.answer.pd, len(fetch.answer.call.parts)
        hosts, ports = for_each(fields.host, prompts) or [], for_each(fields.port, prompts) or []
        self.after(fetch, self.engine.options.kv_wait_s, self._gave_up)
        side = self.peer(ports[fetch.index]) if isinstance(hosts[fetch.index], str) else None
        if isinstance(side, SGLang) and side.role is Role.PREFILL:
            fetch.source = side
            side.join(fetch)

    # Both.

    def forgone(self, fetch: Fetch, outcome: str) -> None:
        source = fetch.source
        if isinstance(source, SGLang):
            source.leave(fetch)
        room = self._rooms.get(fetch.id)
        if room is None or room.wait is not fetch or outcome == "broken":
            return
        del self._rooms[fetch.id]
        hold = None if room.prefill is None else self.holds.of(room.prefill)
        if hold is not None:
            self.holds.free(hold, "aborted" if outcome == "aborted" else "expired")

    def leave(self, fetch: Fetch) -> None:
        """A decode request is over without its KV: the other waits until its own time is over."""
        room = self._rooms.get(fetch.id)
        if room is None or room.decode is not fetch:
            return
        room.decode = None
        if fetch.hold is not None:
            fetch.hold.claims = 0
        if room.prefill is None:
            del self._rooms[fetch.id]

    def _gave_up(self, fetch: Fetch) -> None:
        """Nobody came, or the KV did not."""
        fetch.timer = None
        fetch.answer.fail(
            ApiError(500, f"KVTransferError(bootstrap_room={fetch.id}): timed out", "InternalServerError")
        )

    def server_info(self) -> dict[str, Any] | None:
        """SGLang's own fields of /server_info."""
        mode = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "null"}
        return {
            "disaggregation_mode": mode[self.role],
            "disaggregation_bootstrap_port": self.engine.port,
            "disaggregation_transfer_backend": "mooncake",
        }
