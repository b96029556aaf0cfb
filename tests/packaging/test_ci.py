"""`.ci/run` skips no test for a program of other people that is missing."""

from __future__ import annotations

import re

from tests.support.repository import ROOT

NAMES = re.compile(r"\bTESTS_REQUIRE_[A-Z]+\b")


def test_each_program_that_a_test_needs_is_required() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    needed = {name for source in sources for name in NAMES.findall(source)}
    assert set(NAMES.findall((ROOT / ".ci" / "run").read_text())) == needed
