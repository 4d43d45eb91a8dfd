"""vLLM's MooncakeConnector, both at once: the decode engine asks, the prefill engine pushes.

After vLLM 0.32, but for a stale engine id: there the decode engine notices, here it waits, as versions before
do. The bootstrap server is on the HTTP port of each prefill engine.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvroute.loadtests.mock_engine.pd.base import EngineDies, Fetch, PdSide
from kvroute.loadtests.mock_engine.pd.fields import PdFields
from kvroute.loadtests.mock_engine.pd.holds import Hold
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.wire import ApiError
from kvroute.types import Role

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.dialects.base import Call
    from kvroute.loadtests.mock_engine.engine import MockEngine

_REMOTE = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


class Mooncake(PdSide):
    """A transfer id joins the two requests, in whichever order they come."""

    vllm_name = "MooncakeConnector"

    def __init__(self, engine: MockEngine) -> None:
        super().__init__(engine)
        self._asked: OrderedDict[str, Fetch | None] = OrderedDict()
        """What decode engines have asked for before it was there; None: only to have it freed."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Transfer ids of prefill requests."""

    # The decode engine.

    def rejected(self, fields: PdFields, error: ApiError) -> None:
        if fields.decodes and error.kind != "Bad Request":
            self._release(fields, "released")

    def admit(self, call: Call, fields: PdFields) -> None:
        if fields.decodes and self.role is Role.PREFILL:
            raise EngineDies("a producer is asked to fetch KV")
        if fields.prefills and self.role is Role.DECODE:
            raise EngineDies("a consumer is asked to keep KV")
        if fields.decodes and fields.reads_prompt:
            self._release(fields, "pulled")
            raise ApiError(500, "prompt logprobs of a prompt computed elsewhere", "InternalServerError")

    def queue(self, answer: TokenAnswer, index: int, sequence: Sequence) -> bool:
        fields = answer.pd
        if fields.decodes:
            fetch = Fetch(answer, index, fields.params.get("transfer_id"))
            answer.fetches.append(fetch)
            self.expect(sequence, fetch)
        elif fields.prefills and isinstance(id := fields.params.get("transfer_id"), str) and id:
            self._expect_ask(id)
            sequence.hold = answer.call.parts[index].finish_reason == "length"
        return True

    def fetch(self, sequence: Sequence) -> None:
        fetch = self._fetches[sequence]
        fields = fetch.answer.pd
        if not fields.names(*_REMOTE):
            return  # the real one waits for KV that it never asks for
        fetch.source = source = self._bootstrapped(fields)
        if source is None:
            self.failed(fetch)
            return
        self.after(fetch, self.engine.options.kv_wait_s, self.failed)
        if source.engine_id == fields.params["remote_engine_id"]:
            source.ask(fetch)

    def forgone(self, fetch: Fetch, outcome: str) -> None:
        source = fetch.source
        if source is None or not source.is_up:
            return
        asked = self._at(source).withdraw(fetch, told=outcome != "broken")
        if fetch.hold is not None and not asked:
            fetch.hold.claims -= 1
            if outcome == "broken":
                source.holds.lease(fetch.hold, source.engine.options.kv_lease_s)
            else:
                source.holds.free(fetch.hold, "released")

    # The prefill engine.

    def ask(self, fetch: Fetch) -> None:
        """A decode engine wants a prompt's KV."""
        id = str(fetch.id)
        hold = self.holds.get(id)
        if id in self._asked or (hold is not None and hold.claims) or self.holds.fate(id) == "pulled":
            self.books.note("repeated", id)
        elif hold is not None:
            self._send(hold, fetch)
        else:
            self._remember(self._asked, id, fetch)

    def withdraw(self, fetch: Fetch, told: bool) -> bool:
        """A decode request is over. Unless its engine died, what it asked for is freed once it is there."""
        id = str(fetch.id)
        if self._asked.get(id) is not fetch:
            return False
        if told:
            self._asked[id] = None
        else:
            del self._asked[id]
        return True

    def prefilled(self, sequence: Sequence) -> None:
        answer, _ = sequence.payload
        options = self.engine.options
        id = str(answer.pd.params["transfer_id"])
        blocks = -(-sequence.prompt_tokens // options.block_size_tokens)
        delay_s = answer.faults.handoff_delay
        hold = self.holds.add(id, sequence, blocks, lease_s=options.kv_lease_s, delay_s=delay_s)
        if id not in self._asked:
            return
        fetch = self._asked.pop(id)
        if fetch is None:
            self.holds.free(hold, "released")
        else:
            self._send(hold, fetch)

    def bootstrap(self) -> dict[str, Any] | None:
        if self.role is Role.DECODE:
            return None
        address = f"tcp://{self.engine.host}:{self.engine.port}"
        return {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": address}}}}

    def _expect_ask(self, id: str) -> None:
        if id in self._known:
            self.books.note("repeated", id)
        self._remember(self._known, id, None)

    def _remember(self, book: OrderedDict[str, Any], id: str, value: Any) -> None:
        book[id] = value
        if len(book) > self.books.max_ids:
            book.popitem(last=False)

    def _send(self, hold: Hold, fetch: Fetch) -> None:
        """Push: the lease does not run meanwhile."""
        hold.claims += 1
        fetch.hold = hold
        self.holds.lease(hold, None)
        side = self._at(fetch.answer.engine.pd)
        side.after(fetch, side.transfer_s(fetch, hold), side.arrived)

    def arrived(self, fetch: Fetch) -> None:
        """The bytes are here, if the prefill engine still was."""
        source, hold = fetch.source, fetch.hold
        if source is None or hold is None or source.holds.of(hold.sequence) is not hold:
            self.after(fetch, self.engine.options.kv_wait_s, self.failed)
            return
        wrong = "poisoned" if hold.is_wrong else None
        if hold.tokens != fetch.part.tokens:
            wrong = "foreign"
        source.holds.free(hold, "pulled")
        self.received(fetch, wrong)

    # Both.

    def _release(self, fields: PdFields, why: str) -> None:
        """Ask for KV that nobody needs any more, so that it is freed."""
        source, id = self._bootstrapped(fields), fields.params.get("transfer_id")
        if source is None or source.engine_id != fields.params.get("remote_engine_id") or not id:
            return
        hold = source.holds.get(id)
        if hold is not None:
            source.holds.free(hold, why)
        elif source.holds.fate(id) == "unknown":
            source._remember(source._asked, str(id), None)

    def _bootstrapped(self, fields: PdFields) -> Mooncake | None:
        """Whose bootstrap server a request names."""
        try:
            port = urlsplit(str(fields.params.get("remote_bootstrap_addr"))).port
        except ValueError:
            return None
        side = self.peer(port)
        return side if isinstance(side, Mooncake) and side.bootstrap() is not None else None

    @staticmethod
    def _at(side: PdSide) -> Mooncake:
        assert isinstance(side, Mooncake), "a fleet has one connector"
        return side
