"""What every test file has in common."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_left_is_not_collected_again() -> None:
    """As the gateway does at its start: else a full collection, in the middle of a test that bounds a wait,
    looks for a quarter of a second at what some hundred files have imported and made.
    """
    gc.collect()
    gc.freeze()
