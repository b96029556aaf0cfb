"""The rules without the hook, in whatever is compiled meanwhile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.report import Report


@contextlib.contextmanager
def with_rules() -> Iterator[Report]:
    """Have the rules, and nothing that was compiled before or is so here; yields what they report to."""
    import torch

    from pygraphd.client import _torch
    from pygraphd.client.placement.passes import FILES, Placement
    from pygraphd.client.report import Report

    torch._dynamo.reset()
    report = Report()
    remove = _torch.add_pass(Placement(lambda: report), FILES)
    try:
        yield report
    finally:
        remove()
        torch._dynamo.reset()
