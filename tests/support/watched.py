"""The hook under test, and its counters to hold against what should have happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.client.common.report import Report
    from pygraphd.client.frontend.installation import Hook
    from pygraphd.client.frontend.runtime import Runtime


class Watched:
    """The hook under test; `expect` holds its counters against what should have happened."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @property
    def spool(self) -> Path:
        """Where what was measured lies."""
        assert self._hook.runtime is not None
        return self._hook.runtime.locations.spool

    @property
    def session(self) -> Runtime:
        assert self._hook.runtime is not None
        return self._hook.runtime

    @property
    def report(self) -> Report:
        return self.session.report

    def expect(self, **counts: int) -> None:
        """Assert the named counters, and that nothing of ours has failed but the finding of a daemon."""
        counted = {name: self.report.counts[name] for name in counts}
        assert counted == counts, f"counted {counted}, expected {counts}"
        failures = {text for text in self.report.failures if not text.startswith("daemon: ")}
        assert failures == set(), failures

    def deployed(self) -> dict[str, int]:
        """Return how many regions run in each deployment that any runs in."""
        deployed: dict[str, int] = self.report.summary()["deployed"]
        return {name: count for name, count in deployed.items() if count}

    def reasons(self) -> dict[str, int]:
        reasons: dict[str, int] = self.report.summary()["reasons"]
        return reasons

    def close(self) -> Any:
        """End the session as a process does."""
        assert self._hook.runtime is not None
        self._hook.runtime.close()
