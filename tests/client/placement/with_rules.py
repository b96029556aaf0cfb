"""The rules without the hook, in whatever is compiled meanwhile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.report import Report


@contextlib.contextmanager
def with_rules(few_numbers: int = 0) -> Iterator[Report]:
    """Have the rules, and nothing that was compiled before or is so here; yields what they report to.

    Fewer numbers than `few_numbers` are left to PyTorch.
    """
    import torch

    from pygraphd.client import _torch
    from pygraphd.client.placement import inputs, told
    from pygraphd.client.placement.passes import FILES, Placement
    from pygraphd.client.placement.sending import sender
    from pygraphd.client.report import Report

    torch._dynamo.reset()
    report = Report()

    def tell_and_go_on(original: Callable[[], None], compiled: Any, _: object) -> None:
        told.tell(compiled, report, sender.note_lines)
        original()

    remove = _torch.add_pass(Placement(lambda: report), FILES)
    listen_no_more = _torch.install(tell_and_go_on, lambda original, model, kwargs: original(model, **kwargs))
    try:
        with mock.patch.object(inputs, "FEW_NUMBERS", few_numbers):
            yield report
    finally:
        listen_no_more()
        remove()
        torch._dynamo.reset()
