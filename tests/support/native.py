"""The compiled helper for tests: compiled once, and loaded for each test that asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pygraphd.client.replay.native.ffi import Helper, TensorOps


@pytest.fixture(scope="session")
def compiled_helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder in which the compiled helper is."""
    from pygraphd.client.replay.native.ffi import Helper

    folder = tmp_path_factory.mktemp("helper")
    assert Helper().prepare(folder) is None
    return folder


@pytest.fixture(scope="session")
def helper_of_all(compiled_helper: Path) -> Helper:
    """Return the helper loaded once, since each load takes a descriptor for good."""
    from pygraphd.client.replay.native.ffi import Helper

    helper = Helper()
    assert helper.prepare(compiled_helper) is None
    return helper


@pytest.fixture
def loaded_helper(helper_of_all: Helper) -> Iterator[TensorOps]:
    """Return the helper, which the process has loaded until the end of the test."""
    from pygraphd.client.replay.native.ffi import helper

    vars(helper).update(vars(helper_of_all))
    yield helper.ops
    helper.forget()
