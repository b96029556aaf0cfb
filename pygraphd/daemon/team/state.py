"""The state of the exchange with a team, for `pygraphd status`, statistics and metrics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pygraphd.schema.checks import check_int, check_number, check_text
from pygraphd.schema.messages import MAX_COUNT, MAX_TIME


@dataclass(frozen=True, slots=True)
class TeamState:
    """The state of the exchange with a team's database; times are seconds since the epoch.

    `answered_at`: when it last answered; None: never since the daemon started. `failing_since` and `problem`: since when it cannot be used, and
    why; None and empty if it can. `retry_s`: seconds until it is tried again. `why_not_published`: why nothing is published although it can be
    read; empty if it is. `queued` records wait to be published, then `unpublished` entries of the cache, as last counted; `wanted` graphs wait
    to be asked for; `dropped` records will never be published.
    """

    url: str
    answered_at: float | None = None
    failing_since: float | None = None
    problem: str = ""
    retry_s: float = 0.0
    why_not_published: str = ""
    queued: int = 0
    unpublished: int = 0
    wanted: int = 0
    dropped: int = 0
    queue_problem: str = ""

    def __post_init__(self) -> None:
        for name, longest in (
            ("url", 2500),
            ("problem", 500),
            ("why_not_published", 500),
            ("queue_problem", 5000),
        ):
            check_text(name, getattr(self, name), maximum=longest)
        for name in ("queued", "unpublished", "wanted", "dropped"):
            check_int(name, getattr(self, name), maximum=MAX_COUNT)
        for moment in (self.answered_at, self.failing_since):
            if moment is not None:
                check_number("moment", moment, maximum=MAX_TIME)
        check_number("retry_s", self.retry_s, maximum=MAX_TIME)

    @property
    def is_reached(self) -> bool:
        """Whether the database answered when it was last asked."""
        return self.answered_at is not None and not self.problem

    def as_json(self) -> dict[str, object]:
        """Return the state as JSON has it."""
        return dataclasses.asdict(self)
