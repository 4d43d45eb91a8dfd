"""Batches of one publisher in order: gaps, replays, restarts, duplicates. Pure: no sockets, no clock.

Live batches apply while their numbers follow each other. Whenever they might not have, after a gap, a
connection made anew, or for a check now and then, the publisher is asked again from the last batch applied,
*that one included*: its digest says whether the publisher is still the same process. An engine that
restarted and caught up would be invisible otherwise. Live batches wait meanwhile, and apply in order.

What cannot be had again leaves the holder cleared and rebuilt from what there is: it then lacks blocks that
the engine has, but has none that the engine lacks. Such a stream is not `complete`.
"""

from __future__ import annotations

from collections import Counter

from kvroute.conductor.events.actions import Action, Apply, AskReplay, Clear, Watermark
from kvroute.conductor.events.batches import Batch, Cleared, Undecodable

ATTEMPTS = 3
"""Replays that may fail in a row before the stream goes on without."""
COUNTS = (
    "gaps",
    "restarts",
    "replays",
    "replay_failures",
    "missing",
    "duplicates",
    "overflows",
    "undecodable",
)
_REMEMBERED = 256


class Stream:
    """Of one publisher; `connected` comes first. Every method returns what to do, in order.

    Counters are in `counts`, by the names in `COUNTS`.
    """

    def __init__(self, waiting_batches: int, waiting_bytes: int, restored: Watermark | None = None) -> None:
        mark = restored or Watermark()
        self.last_seq = mark.seq
        self.digest = mark.digest
        self.complete = mark.complete
        self.verified = restored is None
        """False while a restored state has not been confirmed by the publisher."""
        self.checked = True
        """False while the last check of an idle publisher came to nothing."""
        self.replaying = True
        """True while live batches wait."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._waiting: dict[int, Batch] = {}
        self._waiting_bytes = 0
        self._limits = waiting_batches, waiting_bytes
        self._ask_again = False
        self._only_check = False
        self._anchored = False
        self._failures = 0
        self._digests: dict[int, int] = {}

    def __repr__(self) -> str:
        state = "replaying" if self.replaying else "live"
        return f"<Stream at {self.last_seq}, {state}, {len(self._waiting)} waiting>"

    @property
    def asked(self) -> int:
        """Number of the replay asked for last: answers to an earlier one must not be brought here."""
        return self.counts["replays"]

    @property
    def behind(self) -> bool:
        """True while something may be missing; to check an idle publisher is no reason to think so."""
        return self.replaying and not (self._only_check and not self._waiting and not self._ask_again)

    @property
    def waiting(self) -> int:
        """Gauge: live batches that wait for a replay."""
        return len(self._waiting)

    @property
    def watermark(self) -> Watermark:
        """Of what has been applied, for a stream that goes on from there."""
        return Watermark(self.last_seq, self.digest, self.complete)

    # What happens.

    def connected(self) -> list[Action]:
        """The connection stands, for the first time or anew: who knows what was missed meanwhile."""
        self._drop_waiting()
        self._failures = 0
        self._only_check = False
        return [self._ask()]

    def verify(self) -> list[Action]:
        """Nothing came for a while: is that so?"""
        if self.replaying:
            return []
        self._only_check = True
        return [self._ask()]

    def live(self, batch: Batch) -> list[Action]:
        """A batch came by subscription."""
        if self.replaying:
            self._wait(batch)
            return []
        if batch.seq == self.last_seq + 1:
            return [self._apply(batch)]
        if self._digests.get(batch.seq) == batch.digest:
            self.counts["duplicates"] += 1
            return []
        if batch.seq <= self.last_seq:
            return self._restarted(batch)
        self.counts["gaps"] += 1
        self._wait(batch)
        return [self._ask()]

    def undecodable(self, message: Undecodable) -> list[Action]:
        """A live message could not be read: what it was can be asked for."""
        self.counts["undecodable"] += 1
        if self.replaying:
            self._ask_again = True
            return []
        return [self._ask()]

    def replayed(self, batch: Batch) -> list[Action]:
        """An answer to the replay asked for last."""
        if not self.replaying:
            return []
        if not self._anchored:
            self._anchored = True
            return self._anchor(batch)
        if batch.seq <= self.last_seq:
            self.counts["duplicates"] += 1
            return []
        if batch.seq != self.last_seq + 1:
            return self._failed()
        waiting = self._waiting.pop(batch.seq, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.size_bytes
            if waiting.digest != batch.digest:
                return self._restarted(waiting)
            self.counts["duplicates"] += 1
        self._failures = 0  # as long as there is progress, a broken answer is asked for again
        return [self._apply(batch)]

    def replayed_undecodable(self, message: Undecodable) -> list[Action]:
        """An answer could not be read, so that batch is lost: what it removed must not stay."""
        self.counts["undecodable"] += 1
        if not self.replaying:
            return []
        if message.seq is None:
            return self._failed()
        if message.seq <= self.last_seq:
            return [] if self._anchored else self._restarted(None)
        self._anchored = True
        return [self._forget("undecodable", message.seq)]

    def replay_ended(self) -> list[Action]:
        """The publisher said all it has."""
        if not self.replaying:
            return []
        if not self._anchored and self.last_seq >= 0:
            return self._restarted(None)  # it has had fewer batches than were applied
        if not self._anchored:
            self.complete = 0 in self._waiting or not self._waiting
        return self._drain()

    def replay_failed(self, for_good: bool = False) -> list[Action]:
        """No answer, or none for too long; `for_good`: nobody is there to answer."""
        if not self.replaying:
            return []
        if for_good:
            self._failures = ATTEMPTS
        return self._failed()

    # What comes of it.

    def _ask(self) -> AskReplay:
        self.counts["replays"] += 1
        self.replaying = True
        self._anchored = False
        self._ask_again = False
        return AskReplay(max(self.last_seq, 0), self._failures)

    def _apply(self, batch: Batch) -> Apply:
        self.last_seq, self.digest = batch.seq, batch.digest
        if any(type(event) is Cleared for event in batch.events):
            self.complete = True
        digests = self._digests
        digests[batch.seq] = batch.digest
        if len(digests) > _REMEMBERED:
            del digests[next(iter(digests))]
        return Apply(batch)

    def _forget(self, reason: str, last_seq: int = -1, complete: bool = False) -> Clear:
        self.last_seq, self.digest, self.complete = last_seq, 0, complete
        self.verified = True
        self._digests.clear()
        return Clear(reason)

    def _anchor(self, first: Batch) -> list[Action]:
        """The first answer says whether what was applied and what follows are one sequence."""
        if self.last_seq < 0:
            self.complete = first.seq == 0
            self.counts["missing"] += not self.complete
            return [self._take(first)]
        if first.seq == self.last_seq and self.digest in (first.digest, 0):
            self.verified = True
            return []
        if first.seq <= self.last_seq:
            return self._restarted(None)
        self.counts["missing"] += 1
        return [self._forget("missing"), self._take(first)]

    def _take(self, first: Batch) -> Apply:
        waiting = self._waiting.pop(first.seq, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.size_bytes
        return self._apply(first)

    def _restarted(self, batch: Batch | None) -> list[Action]:
        """Another process publishes, of which `batch` is the first news: all anew, from its beginning."""
        self.counts["restarts"] += 1
        self._drop_waiting()
        cleared = self._forget("restart", complete=True)
        if batch is not None and batch.seq == 0:
            self.replaying = False
            return [cleared, self._apply(batch)]
        self._failures = 0
        ask = self._ask()
        if batch is not None:
            self._wait(batch)
        return [cleared, ask]

    def _failed(self) -> list[Action]:
        self.counts["replay_failures"] += 1
        self._failures += 1
        if self._failures < ATTEMPTS:
            return [self._ask()]
        self._failures = 0
        waiting = sorted(self._waiting.items())
        if self._only_check and not self._ask_again and _follows(waiting, self.last_seq):
            self.checked = False
            cleared: list[Action] = []
        else:
            cleared = [self._forget("given_up")]
            waiting = _last_run(waiting)
            self.complete = bool(waiting) and waiting[0][0] == 0
        self._drop_waiting()
        self.replaying = False
        return [*cleared, *(self._apply(batch) for _, batch in waiting)]

    def _drain(self) -> list[Action]:
        """Apply what waited, as far as it follows; ask again for what is still missing."""
        actions: list[Action] = []
        self.checked = True
        for seq, batch in sorted(self._waiting.items()):
            if seq > self.last_seq + 1:
                break
            del self._waiting[seq]
            self._waiting_bytes -= batch.size_bytes
            if seq <= self.last_seq:
                self.counts["duplicates"] += 1
            else:
                actions.append(self._apply(batch))
        if self._ask_again:
            return [*actions, self._ask()]
        if self._waiting:
            return [*actions, *self._failed()]
        self._failures = 0
        self.verified = True
        self.replaying = self._only_check = False
        return actions

    def _wait(self, batch: Batch) -> None:
        same = self._waiting.get(batch.seq)
        if same is not None and same.digest == batch.digest:
            self.counts["duplicates"] += 1
            return
        batches, size_bytes = self._limits
        full = len(self._waiting) >= batches or self._waiting_bytes + batch.size_bytes > size_bytes
        if full or same is not None:  # the second: two processes under one number
            self.counts["overflows"] += full
            self._drop_waiting()
            self._ask_again = True
            return
        self._waiting[batch.seq] = batch
        self._waiting_bytes += batch.size_bytes

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0


def _follows(waiting: list[tuple[int, Batch]], last_seq: int) -> bool:
    return all(seq == last_seq + 1 + index for index, (seq, _) in enumerate(waiting))


def _last_run(waiting: list[tuple[int, Batch]]) -> list[tuple[int, Batch]]:
    """The batches that follow each other up to the last: before it, something was missed."""
    start = max(0, len(waiting) - 1)
    while start > 0 and waiting[start - 1][0] + 1 == waiting[start][0]:
        start -= 1
    return waiting[start:]
