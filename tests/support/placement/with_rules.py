"""The rules without the hook, in whatever is compiled meanwhile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.common.report import Report


@contextlib.contextmanager
def with_rules(few_numbers: int = 0, *, split: bool = False) -> Iterator[Report]:
    """Have the rules, and nothing that was compiled before or is so here; yields what they report to.

    Fewer numbers than `few_numbers` are sent as PyTorch sends them. `split` has graphs split in modes without CUDA graphs, too.
    """
    import torch

    from pygraphd.client.backend import torch_private
    from pygraphd.client.common.report import Report
    from pygraphd.client.placement import inputs, provenance
    from pygraphd.client.placement.pipeline import FILES, Placement

    torch._dynamo.reset()
    report = Report()

    def tell_and_go_on(original: Callable[[], None], compiled: Any, _: object) -> None:
        provenance.report_results(compiled, report)
        original()

    split_no_more = torch_private.split_graphs(frozenset()) if split else lambda: None
    remove = torch_private.add_pass(Placement(lambda: report), FILES)
    listen_no_more = torch_private.install(
        tell_and_go_on, lambda original, model, kwargs: original(model, **kwargs)
    )
    try:
        with mock.patch.object(inputs, "FEW_SCALARS", few_numbers):
            yield report
    finally:
        listen_no_more()
        remove()
        split_no_more()
        torch._dynamo.reset()
