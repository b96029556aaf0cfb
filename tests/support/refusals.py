"""Says why a callable was not recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraphd.client.recording.recordings import Recordings


def refusal_of(run: Recordings) -> str | None:
    """Return the text of the reason; None if there is a recording, or none was tried."""
    why = run.why_refused
    return None if why is None else why.detail
