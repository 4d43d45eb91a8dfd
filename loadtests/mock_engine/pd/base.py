"""An engine's part in prefill and decode: what every dialect shares, and what a request passes on its way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.loadtests.mock_engine.pd.fields import PdFields
from kvroute.loadtests.mock_engine.pd.holds import Hold, Holds
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.wire import ApiError
from kvroute.types import Role

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.dialects.base import Call, Part
    from kvroute.loadtests.mock_engine.engine import MockEngine


class EngineDies(Exception):
    """A request that ends the process of the real engine; the message says where."""


@dataclass(slots=True, eq=False)
class Fetch:
    """KV that a decode request gets from elsewhere, for one prompt."""

    answer: TokenAnswer
    index: int
    id: Any
    """By which it asks."""
    source: PdSide | None = None
    """Whom; None when there is nobody."""
    hold: Hold | None = None
    """Claimed there."""
    is_over: bool = False
    """It came, failed, or is no longer wanted."""
    timer: asyncio.TimerHandle | None = None
    """The next thing that happens to it by itself."""

    @property
    def part(self) -> Part:
        """The prompt."""
        return self.answer.call.parts[self.index]


class PdSide:
    """Of one engine incarnation. As it is, that of an engine without a connector: it heeds nothing.

    A request passes `admit`, `begin`, then for each prompt `queue` and either `prefilled` (its KV is here) or
    `fetch` (there is room for it), and in the end `ended`; one that was refused passes `rejected` alone.
    """

    vllm_name: str | None = None
    """Of the connector in vLLM's configuration."""

    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self.role = engine.options.role_of(engine.index)
        self.engine_id = str(uuid.uuid4())
        """As vLLM's: another one for each start."""
        self.books = engine.pd_books
        self.holds = Holds(engine)
        self.is_up = True
        self.received_tokens = 0
        """Of this incarnation: prompt tokens whose KV came from elsewhere."""
        self._fetches: dict[Sequence, Fetch] = {}
        self._poisoned: set[int] = set()

    # A request's way.

    def rejected(self, fields: PdFields, error: ApiError) -> None:
        """A request ends with an error before it was admitted."""

    def admit(self, call: Call, fields: PdFields) -> None:
        """Check and change a call. `ApiError` refuses it, `EngineDies` is worse."""

    def begin(self, answer: TokenAnswer) -> None:
        """A request was admitted."""

    def queue(self, answer: TokenAnswer, index: int, sequence: Sequence) -> bool:
        """Say how a prompt is to run, before it is queued; False: not yet, this side queues it itself."""
        return True

    def begun(self, sequence: Sequence) -> None:
        """The scheduler took a prompt in; blocks that it found here may hold wrong KV."""
        if self._poisoned and not sequence.generated_tokens:
            found = (sequence.cached_tokens or 0) // self.engine.options.block_size_tokens
            self._check_found(sequence, sequence.keys[:found])

    def prefilled(self, sequence: Sequence) -> None:
        """The KV of a prompt with `hold` is complete, and its answer not yet sent."""

    def fetch(self, sequence: Sequence) -> None:
        """There is room for the KV of a remote prompt."""

    def ended(self, answer: TokenAnswer, outcome: str) -> None:
        """A request is over; its sequences leave the scheduler next."""
        for fetch in answer.fetches:
            if not fetch.is_over:
                self.close(fetch)
                self.forgone(fetch, outcome)
        for part in answer.call.parts:
            if part.sequence is None:
                continue
            self._fetches.pop(part.sequence, None)
            hold = self.holds.of(part.sequence)
            if hold is not None and outcome == "aborted":
                self.holds.free(hold, "aborted")

    def forgone(self, fetch: Fetch, outcome: str) -> None:
        """A request ended before its KV came; `broken`: with the process, so that nobody is told."""

    # The engine around it.

    def evicted(self, keys: Iterable[int]) -> None:
        """These blocks left the GPU."""
        if self._poisoned:
            self._poisoned.difference_update(keys)

    def forget(self) -> None:
        """The cache was cleared."""
        self._poisoned.clear()

    def parked(self) -> list[Any]:
        """Ids of what came for requests that have not come."""
        return []

    def start(self) -> None:
        """The engine listens."""

    def stop(self) -> None:
        """The process ends."""
        self.is_up = False
        for fetch in self._fetches.values():
            self.close(fetch)
        self._fetches.clear()
        self.holds.lose()

    def bootstrap(self) -> dict[str, Any] | None:
        """What `GET /query` answers; None: there is no such path."""
        return None

    def server_info(self) -> dict[str, Any] | None:
        """vLLM's `kv_transfer_config`."""
        if self.vllm_name is None:
            return None
        roles = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
        return {
            "kv_connector": self.vllm_name,
            "engine_id": self.engine_id,
            "kv_buffer_device": "cuda",
            "kv_role": roles[self.role],
            "kv_port": 14579,
            "kv_connector_extra_config": {},
            "kv_connector_module_path": None,
            "enable_permute_local_kv": False,
            "kv_load_failure_policy": self.engine.options.kv_load_failure,
        }

    # For the dialects.

    def peer(self, port: object) -> PdSide | None:
        """The engine of the fleet on that HTTP port, which stands for its other ports too."""
        sides = (engine.pd for engine in self.engine.peers if engine.port == port)
        return next((side for side in sides if side.is_up), None)

    def expect(self, sequence: Sequence, fetch: Fetch) -> None:
        """A prompt's KV will come: it waits for that once it has room."""
        sequence.remote = True
        self._fetches[sequence] = fetch

    def transfer_s(self, fetch: Fetch, hold: Hold | None) -> float:
        """Real seconds until a prompt's KV is here, its faults' delays included."""
        delay_s = fetch.answer.faults.handoff_delay + (hold.delay_s if hold is not None else 0.0)
        return delay_s + self.move_s(len(fetch.part.tokens))

    def move_s(self, prompt_tokens: int) -> float:
        """Real seconds that so much KV takes, in whole blocks."""
        options = self.engine.options
        blocks = -(-prompt_tokens // options.block_size_tokens)
        size = blocks * options.block_size_tokens * options.step_speed.kv_bytes_per_token
        return size / options.handoff_bytes_per_s / options.speed

    def after(self, fetch: Fetch, delay_s: float, action: Callable[[Fetch], None]) -> None:
        """Go on with a fetch later, unless it is over by then; the one thing it waits for."""
        if fetch.timer is not None:
            fetch.timer.cancel()
            fetch.timer = None
        if delay_s <= 0:
            action(fetch)
        else:
            fetch.timer = asyncio.get_running_loop().call_later(delay_s, action, fetch)

    def close(self, fetch: Fetch) -> None:
        """Nothing more happens to a fetch."""
        fetch.is_over = True
        if fetch.timer is not None:
            fetch.timer.cancel()
            fetch.timer = None

    def received(self, fetch: Fetch, wrong: str | None, of_tokens: int | None = None) -> None:
        """A prompt's KV is here, or that of its first tokens.

        `wrong` says why it is not this prompt's: then the text is not this prompt's either.
        """
        sequence = fetch.part.sequence
        if fetch.is_over or sequence is None or sequence.phase is not Phase.RECEIVING:
            return
        self.close(fetch)
        found, tokens = sequence.resident_blocks, of_tokens or sequence.prompt_tokens
        if wrong is not None:
            self._poisoned.update(sequence.keys[found : tokens // self.engine.options.block_size_tokens])
            self.spoil(sequence, fetch.id, wrong)
        self._check_found(sequence, sequence.keys[:found])
        self.received_tokens += tokens
        self.books.received_tokens += tokens
        sequence.cached_tokens = tokens
        self.engine.driver.received(sequence)

    def failed(self, fetch: Fetch) -> None:
        """A prompt's KV will not come, and the engine knows: it computes the prompt, or gives up."""
        if fetch.is_over:
            return
        self.close(fetch)
        self.books.failed_loads += 1
        if self.engine.options.kv_load_failure == "fail":
            fetch.answer.fail(ApiError(500, "KV load failure", "InternalServerError"))
        else:
            self.engine.driver.compute_instead(fetch.answer, fetch.index)

    def spoil(self, sequence: Sequence, id: Any, why: str) -> None:
        """The text of an answer will be wrong, with status 200."""
        answer, index = sequence.payload
        self.books.note("wrong_text", {"id": id, "request": answer.entry.id, "why": why})
        self.engine.intake.spoil(answer.call, index, answer.script.words)

    def _check_found(self, sequence: Sequence, keys: Iterable[int]) -> None:
        """Wrong KV stays in the cache under the keys of the right one, for whoever comes next."""
        answer, index = sequence.payload
        if not answer.call.parts[index].is_wrong and not self._poisoned.isdisjoint(keys):
            self.spoil(sequence, answer.entry.id, "poisoned")
