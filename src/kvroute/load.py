"""What a worker is carrying: charged with the choice, moved on at the first byte, released at the end.

The same books serve the gateway and the simulator. Seconds are those of the worker's preset before any
correction, so that a correction learned later holds for what was charged before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

PREFILL_SHARE_TAU_S = 30.0
"""Time constant of the share of time a worker spends prefilling."""


class Charge:
    """What one request adds to one worker. `first_byte` and `release` are idempotent."""

    __slots__ = (
        "_awaits_kv",
        "_keys",
        "_load",
        "_pending",
        "_released",
        "output_tokens",
        "prefill_s",
        "prompt_tokens",
        "uncached_tokens",
    )

    def __init__(
        self,
        load: WorkerLoad,
        prefill_s: float,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: float,
        keys: Sequence[int],
    ) -> None:
        self.prefill_s = prefill_s
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.output_tokens = output_tokens
        self._load = load
        self._keys = keys
        self._pending = True
        self._awaits_kv = False
        self._released = False

    def await_kv(self, now_s: float) -> None:
        """Its prompt is prefilled elsewhere: for prices it decodes here from now on, but its KV takes
        no room before the first byte.
        """
        self.first_byte(now_s)
        self._awaits_kv = True
        self._load.awaited_tokens += self.prompt_tokens

    def first_byte(self, now_s: float) -> None:
        """Prefill is over."""
        if self._pending:
            self._pending = False
            self._load.prefilled(self, now_s)
        self._has_kv()

    def release(self, now_s: float) -> None:
        """The request is over, whatever phase it was in."""
        if not self._released:
            self._released = True
            self._has_kv()
            self._load.released(self, self._keys, now_s, pending=self._pending)
            self._pending = False

    def _has_kv(self) -> None:
        if self._awaits_kv:
            self._awaits_kv = False
            self._load.awaited_tokens -= self.prompt_tokens


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """Mutable on purpose: charged and released in the same synchronous step as the choice, so that a policy
    never reads a stale copy. Policies only read it.
    """

    requests: int = 0
    """Leases charged here and not yet released, those of other gateway replicas included; never negative."""
    pending_prefill_tokens: int = 0
    """Estimated uncached prompt tokens of those leases that have not answered their first byte."""
    reported_running: int | None = None
    """From the engine's own metrics; None is unknown (never polled, or the sample is too old)."""
    reported_waiting: int | None = None
    kv_usage_ratio: float | None = None
    kv_unbooked_tokens: float = 0.0
    """What an engine's report showed of KV beyond `kv_tokens`: others' requests; below it when negative, as
    a prefix that running requests share lies there once."""
    prefilling: int = 0
    """This gateway's requests without a first byte."""
    pending_prefill_s: float = 0.0
    """Their prefill, in order of arrival; the head's progress is not taken off."""
    others_prefill_s: float = 0.0
    """The pending prefill of other replicas' requests."""
    head_prefill_s: float = 0.0
    """Of it, what the oldest of them takes."""
    head_since_s: float = 0.0
    """When that one's turn came."""
    context_tokens: float = 0.0
    """Tokens that this gateway's decoding requests attend to, each counted at half of its output."""
    kv_tokens: float = 0.0
    """Prompt and expected output of all of this gateway's requests."""
    growth_tokens: float = 0.0
    """Of that, output yet to come: half of what is expected of those decoding, all of those prefilling."""
    awaited_tokens: int = 0
    """Of `kv_tokens`, prompts whose KV is still to come from a prefill worker."""
    prefilled_s: float = 0.0
    """Prefill seconds of late, fading with `PREFILL_SHARE_TAU_S`, as of `prefilled_at_s`."""
    prefilled_at_s: float = 0.0
    version: int = 0
    """Grows with every change of what prices are made of: all above but what engines report as it is."""
    active_keys: dict[int, int] = field(default_factory=dict)
    """References to the blocks of running requests; kept only for a policy that `needs_active_keys`."""
    _pending: dict[Charge, None] = field(default_factory=dict)

    @property
    def decoding(self) -> int:
        """Requests past their first byte, those of other replicas included."""
        return self.requests - self.prefilling

    def ahead_s(self, now_s: float, scale: float = 1.0) -> float:
        """Seconds of prefill ahead of a newcomer, where a second of the preset takes `scale` seconds.

        The oldest runs since its turn came; overdue, it counts nothing more, and those behind it in full.
        """
        if not self.prefilling:
            return self.others_prefill_s * scale
        done_s = (now_s - self.head_since_s) / scale
        left_s = self.pending_prefill_s - min(done_s, self.head_prefill_s)
        return (left_s + self.others_prefill_s) * scale

    def prefill_share(self, now_s: float, scale: float = 1.0) -> float:
        """Share of the last half minute spent prefilling, from 0; above 1 when estimates were too high."""
        fading = exp((self.prefilled_at_s - now_s) / PREFILL_SHARE_TAU_S)
        return self.prefilled_s * fading * scale / PREFILL_SHARE_TAU_S

    def charge(
        self,
        now_s: float,
        *,
        prefill_s: float = 0.0,
        prompt_tokens: int = 0,
        uncached_tokens: int = 0,
        output_tokens: float = 0.0,
        keys: Sequence[int] = (),
    ) -> Charge:
        """Add one request; `keys` of its blocks only where they are to be counted."""
        charge = Charge(self, prefill_s, prompt_tokens, uncached_tokens, output_tokens, keys)
        self.version += 1
        self.requests += 1
        self.pending_prefill_tokens += uncached_tokens
        self.kv_tokens += prompt_tokens + output_tokens
        self.growth_tokens += output_tokens
        if not self.prefilling:
            self.head_since_s, self.head_prefill_s = now_s, prefill_s
        self.prefilling += 1
        self.pending_prefill_s += prefill_s
        self._pending[charge] = None
        for key in keys:
            self.active_keys[key] = self.active_keys.get(key, 0) + 1
        return charge

    def prefilled(self, charge: Charge, now_s: float) -> None:
        """A charge's own news, through `Charge.first_byte`."""
        self.version += 1
        self._leave_queue(charge, now_s)
        self.context_tokens += charge.prompt_tokens + charge.output_tokens / 2
        self.growth_tokens -= charge.output_tokens / 2
        if charge.prefill_s:
            fading = exp((self.prefilled_at_s - now_s) / PREFILL_SHARE_TAU_S)
            self.prefilled_s = self.prefilled_s * fading + charge.prefill_s
            self.prefilled_at_s = now_s

    def released(self, charge: Charge, keys: Sequence[int], now_s: float, *, pending: bool) -> None:
        """A charge's own news, through `Charge.release`."""
        self.version += 1
        if pending:
            self._leave_queue(charge, now_s)
        else:
            self.context_tokens -= charge.prompt_tokens + charge.output_tokens / 2
        self.growth_tokens -= charge.output_tokens * (1.0 if pending else 0.5)
        self.kv_tokens -= charge.prompt_tokens + charge.output_tokens
        self.requests -= 1
        for key in keys:
            if self.active_keys[key] == 1:
                del self.active_keys[key]
            else:
                self.active_keys[key] -= 1

    @property
    def kv_used_tokens(self) -> float:
        """Room that is taken there, or will be by the end of this gateway's requests."""
        return max(0.0, self.kv_tokens + self.kv_unbooked_tokens)

    def report_kv(self, usage_ratio: float | None, room_tokens: int | None) -> None:
        """The engine says what share of its KV room is in use; what is idle in its cache does not count.

        Until the next report, charges and releases are added to what this one shows. None: it does not say,
        or what it is a share of is not known.
        """
        unbooked = 0.0
        if usage_ratio is not None and room_tokens is not None:
            coming = self.pending_prefill_tokens + self.awaited_tokens + self.growth_tokens
            unbooked = usage_ratio * room_tokens + coming - self.kv_tokens
        self.kv_usage_ratio = usage_ratio
        if unbooked != self.kv_unbooked_tokens:
            self.kv_unbooked_tokens = unbooked
            self.version += 1

    def add_others(self, requests: int, prefill_tokens: int) -> None:
        """Other replicas carry so much more here than they did, or less."""
        self.version += 1
        self.requests += requests
        self.pending_prefill_tokens += prefill_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not balance."""
        assert self.prefilling == len(self._pending) <= self.requests
        assert abs(self.pending_prefill_s - sum(charge.prefill_s for charge in self._pending)) < 1e-6
        assert self.pending_prefill_tokens >= sum(charge.uncached_tokens for charge in self._pending)
        assert min(self.kv_tokens, self.context_tokens, self.growth_tokens) > -1e-3
        assert self.awaited_tokens >= 0

    def _leave_queue(self, charge: Charge, now_s: float) -> None:
        pending = self._pending
        is_head = next(iter(pending)) is charge
        del pending[charge]
        self.prefilling -= 1
        self.pending_prefill_tokens -= charge.uncached_tokens
        if not pending:  # exactly nothing: sums of fractions drift
            self.pending_prefill_s = self.head_prefill_s = 0.0
            return
        self.pending_prefill_s -= charge.prefill_s
        if is_head:
            self.head_since_s, self.head_prefill_s = now_s, next(iter(pending)).prefill_s
