"""The native helper for tests, and what is left of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.client.replay.native.ffi import helper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def by_the_helper(compiled_helper: Path) -> Iterator[None]:
    helper.forget()
    assert helper.prepare(compiled_helper) is None
    yield
    helper.forget()
