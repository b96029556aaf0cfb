"""A folder with a daemon of its own, and the means to talk to it; whatever it started is ended, by pid."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_home import Home
from tests.support.record_requests import ENVIRONMENT, record_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.schema.messages import RecordRequest


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "home")
    opened.path.mkdir(mode=0o700)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return a home whose daemon serves all tests of a file that leave it as they found it."""
    opened = Home(tmp_path_factory.mktemp("shared"))
    opened.path.chmod(0o700)
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def make_request() -> Callable[..., RecordRequest]:
    """Return a maker of requests that record one graph for each name."""

    def make(*names: str, gpu: str = ENVIRONMENT.gpu) -> RecordRequest:
        return record_request(names, dataclasses.replace(ENVIRONMENT, gpu=gpu))

    return make
