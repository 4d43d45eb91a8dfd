"""vLLM's NixlConnector, one after the other: the prefill engine keeps the KV, the decode engine pulls it.

After vLLM 0.32, but for its heartbeats: there a decode engine renews the lease of what it is about to pull,
here a lease runs on, as in versions before. The address of the side channel is the HTTP one.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from kvroute.loadtests.mock_engine.pd.base import EngineDies, Fetch, PdSide
from kvroute.loadtests.mock_engine.pd.fields import PdFields
from kvroute.loadtests.mock_engine.pd.holds import Hold
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.wire import ApiError

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.dialects.base import Call
    from kvroute.loadtests.mock_engine.engine import MockEngine

_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Nixl(PdSide):
    """Ids of requests are the engine's own, so an id of the client's may come twice."""

    vllm_name = "NixlConnector"

    def __init__(self, engine: MockEngine) -> None:
        super().__init__(engine)
        self._computing: dict[Sequence, str] = {}
        """Prefill requests whose KV is not complete, with their ids."""

    def rejected(self, fields: PdFields, error: ApiError) -> None:
        # What the web framework refuses never reaches the serving layer, which tells the prefill engine.
        if fields.decodes and error.kind != "Bad Request":
            self._release(fields, "released")

    def admit(self, call: Call, fields: PdFields) -> None:
        if not fields.decodes:
            return
        if not fields.params.get("remote_block_ids"):
            raise EngineDies("no remote blocks for a request that is to fetch them")
        if fields.reads_prompt:
            self._release(fields, "pulled")
            raise ApiError(500, "prompt logprobs of a prompt computed elsewhere", "InternalServerError")

    def queue(self, answer: TokenAnswer, index: int, sequence: Sequence) -> bool:
        fields = answer.pd
        if fields.decodes:
            self.expect(sequence, answer.fetches[index])
        elif fields.prefills:
            sequence.hold = True
            self._computing[sequence] = f"{answer.call.id}-{index}-{uuid.uuid4().hex[:8]}"
        return True

    def begin(self, answer: TokenAnswer) -> None:
        if not answer.pd.decodes:
            return
        source = self._source(answer.pd)
        id = answer.pd.params.get("remote_request_id")
        if source is not None and id in source._computing.values():
            self.books.note("order_violations", id)
        for index in range(len(answer.call.parts)):
            hold = None if source is None else source.holds.get(id)
            if hold is not None:
                hold.claims += 1
            answer.fetches.append(Fetch(answer, index, id, source, hold))

    def prefilled(self, sequence: Sequence) -> None:
        answer, index = sequence.payload
        options = self.engine.options
        computed_tokens = sequence.prompt_tokens + sequence.output_tokens - 1
        blocks = -(-computed_tokens // options.block_size_tokens)
        hold = self.holds.add(
            self._computing.pop(sequence),
            sequence,
            blocks,
            lease_s=options.kv_lease_s,
            delay_s=answer.faults.handoff_delay,
        )
        if index == 0 and not answer.faults.no_handoff:
            answer.call.kv_transfer_params = self._params(hold)

    def _params(self, hold: Hold) -> dict[str, Any]:
        """What the answer carries for the decode engine, as vLLM 0.32 has it."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [hold.block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": hold.id,
            "remote_host": self.engine.host,
            "remote_port": self.engine.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(hold.tokens),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def fetch(self, sequence: Sequence) -> None:
        fetch = self._fetches[sequence]
        if not fetch.answer.pd.names(*_REMOTE):
            return  # the real one waits for KV that nobody sends
        if fetch.source is None:
            self.failed(fetch)
        else:
            self.after(fetch, self.transfer_s(fetch, fetch.hold), self._pull)

    def forgone(self, fetch: Fetch, outcome: str) -> None:
        if fetch.hold is not None:
            fetch.hold.claims -= 1
            if fetch.source is not None and outcome != "broken":
                fetch.source.holds.free(fetch.hold, "released")

    def ended(self, answer: TokenAnswer, outcome: str) -> None:
        super().ended(answer, outcome)
        for part in answer.call.parts:
            if part.sequence is not None:
                self._computing.pop(part.sequence, None)

    def _pull(self, fetch: Fetch) -> None:
        """The bytes have moved; whether they were the right ones is seen now, and only here."""
        source = fetch.source
        if source is None or not source.is_up:
            self.failed(fetch)
            return
        hold = source.holds.get(fetch.id)
        wrong: str | None = None
        if hold is None:
            wrong = source.holds.fate(fetch.id)
            self.books.note("unknown", fetch.id)
        elif hold.is_wrong:
            wrong = "poisoned"
        elif hold.tokens != fetch.part.tokens or fetch.answer.pd.params["remote_block_ids"] != [
            hold.block_ids
        ]:
            wrong = "foreign"
        if hold is not None:
            source.holds.free(hold, "pulled")
        self.received(fetch, wrong)

    def _source(self, fields: PdFields) -> Nixl | None:
        """The prefill engine that a request names; None when that incarnation is not there."""
        side = self.peer(fields.params.get("remote_port"))
        if isinstance(side, Nixl) and side.engine_id == fields.params.get("remote_engine_id"):
            return side
        return None

    def _release(self, fields: PdFields, why: str) -> None:
        """Tell the prefill engine to free what a request names."""
        source = self._source(fields)
        hold = None if source is None else source.holds.get(fields.params.get("remote_request_id"))
        if source is not None and hold is not None:
            source.holds.free(hold, why)
