"""A hook of its own for each GPU test, with no daemon and an empty home, and the counters to hold against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.hook import Hook

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pygraphd.client.report import Report


class Watched:
    """The hook under test; `expect` holds its counters against what should have happened."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @property
    def report(self) -> Report:
        assert self._hook.session is not None
        return self._hook.session.report

    def expect(self, **counts: int) -> None:
        """Assert the named counters, and that nothing of ours has failed but the finding of a daemon."""
        assert {name: self.report.counts[name] for name in counts} == counts
        failures = {text for text in self.report.failures if not text.startswith("daemon: ")}
        assert failures == set()

    def deployed(self) -> dict[str, int]:
        """Return how many regions run in each deployment that any runs in."""
        deployed: dict[str, int] = self.report.summary()["deployed"]
        return {name: count for name, count in deployed.items() if count}

    def reasons(self) -> dict[str, int]:
        reasons: dict[str, int] = self.report.summary()["reasons"]
        return reasons

    def close(self) -> Any:
        """End the session as a process does."""
        assert self._hook.session is not None
        self._hook.session.close()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Have the hook on for one test."""
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    monkeypatch.setenv("PYGRAPHD_AUTOSTART", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    import torch._inductor.compile_fx

    torch._dynamo.reset()
    hook = Hook()
    hook.enable()
    yield Watched(hook)
    hook.disable()
    torch._dynamo.reset()
