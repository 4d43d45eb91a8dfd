from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvroute.conductor.tokens import yielding
from kvroute.conductor.tokens.template import ChatTemplate
from kvroute.conductor.tokens.yielding import READS, YieldingList

ROWS = [{"role": "user", "content": str(i)} for i in range(3 * READS)]
TEXT = "".join(str(i) for i in range(3 * READS))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_it_is_a_list() -> None:
    assert list(YieldingList(ROWS)) == ROWS
    assert YieldingList(ROWS)[5] is ROWS[5]
    reverse = YieldingList(ROWS)[::-1]
    assert isinstance(reverse, YieldingList)
    assert reverse == ROWS[::-1]


@pytest.mark.parametrize("use_minijinja", [False, True])
def test_long_chats_let_others_run_off_the_main_thread(
    monkeypatch: pytest.MonkeyPatch, use_minijinja: bool
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(yielding.time, "sleep", pauses.append)
    template = ChatTemplate(TEMPLATE, {}, use_minijinja)
    assert template.render(ROWS, False) == TEXT
    assert pauses == []
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(template.render, ROWS, False).result() == TEXT
    assert len(pauses) >= 3
