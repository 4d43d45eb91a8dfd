"""Log lines: what becomes of them, and that they break nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading

from kvroute.router.logs import MAX_QUEUED_LINES, LogWriter, _to_json


class Broken(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError("No space left on device")


def test_lines_are_written_in_order() -> None:
    file = io.StringIO()
    writer = LogWriter(file)
    for number in range(100):
        writer.write(f"{number}\n")
    writer.drain()
    assert file.getvalue().split() == [str(number) for number in range(100)]
    assert writer.dropped == 0


def test_a_file_that_fails_costs_the_lines_and_nothing_else() -> None:
    writer = LogWriter(Broken())
    for _ in range(10):
        writer.write("x\n")
    writer.drain()
    assert writer.dropped == 10


def test_a_reader_that_stopped_holds_nobody_up() -> None:
    reader, end = os.pipe()
    file = os.fdopen(end, "w")
    writer = LogWriter(file)
    sent = threading.Event()

    def send() -> None:
        for _ in range(MAX_QUEUED_LINES + 2000):
            writer.write("x" * 1000 + "\n")
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert sent.wait(10)
    assert writer.dropped > 0
    os.close(reader)
    writer.drain()
    with contextlib.suppress(BrokenPipeError):
        file.close()


def test_a_line_holds_what_a_client_sent_however_odd() -> None:
    line = _to_json({"a": "\ud800\n", "event": "e", "level": "info", "timestamp": "t"})
    assert "\n" not in line
    assert list(json.loads(line)) == ["timestamp", "level", "event", "a"]
