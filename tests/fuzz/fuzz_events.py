"""Coverage-guided fuzzing of the event decoder, by hand: python tests/fuzz/fuzz_events.py [libFuzzer flags].

Needs atheris. Starts from the captured frames beside the tests of events; the first byte of an input says
how it is cut into frames.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvroute.conductor.events"]):
    from kvroute.conductor.events.apply import Applier
    from kvroute.conductor.events.batches import Batch, Undecodable
    from kvroute.conductor.events.decode import decode, ends_replay

from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace

FRAMES = Path(__file__).parents[1] / "conductor" / "events" / "frames"
LIMIT = 1 << 16


def one_input(data: bytes) -> None:
    """Decode, and apply what that gave: nothing may raise, and the index must stay whole."""
    if not data:
        return
    cut, rest = data[0], data[1:]
    frames = [b"", rest[:8], rest[8:]] if cut & 1 else [b"", bytes(8), rest]
    if cut & 2:
        frames.insert(0, b"")
    if cut & 4:
        frames = rest.split(b"|")
    ends_replay(frames)
    message = decode(frames, LIMIT)
    if isinstance(message, Undecodable):
        assert message.reason in ("frames", "seq", "size", "payload", "events")
        return
    assert isinstance(message, Batch)
    index = PrefixIndex(2**21, lambda: 0.0)
    applier = Applier(index, Holder("w"), Namespace(model="m"), min_block_tokens=16 if cut & 8 else 1)
    applier.apply(message, 0.0)
    applier.apply(message, 60.0)
    index.check_integrity()


def main() -> None:
    """Run libFuzzer on a corpus of the captured frames."""
    with tempfile.TemporaryDirectory() as corpus:
        for path in FRAMES.glob("*.bin"):
            payload = path.read_bytes()
            start = payload.find(b"\x93\xcb")
            if start > 0:
                (Path(corpus) / path.stem).write_bytes(b"\0" + payload[start:])
        atheris.Setup([*sys.argv, corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
