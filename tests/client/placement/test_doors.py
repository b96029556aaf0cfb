"""The rules are applied to graphs that come in by any door, the first one, too; where they are not, the summary says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.user_program import Run

pytestmark = pytest.mark.torch

# The CPU is taken for a GPU. Matrix products and indices alone: no C++ compiler takes its seconds.
PROGRAM = """
import torch
from pygraphd.client.placement import fx_utils

fx_utils.is_gpu = lambda device: True
{before}

def pick(x):
    return x[:, torch.tensor([5, 3, 1, 0, 2, 4, 6, 8, 7, 9, 11, 10])] @ x.t()

x = torch.randn(12, 12)
torch.testing.assert_close(torch.compile(pick, {arguments})(x), pick(x))
"""
THEIRS = """
import torch._inductor.compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

class Theirs(CustomGraphPass):
    def __call__(self, graph):
        print("theirs")

    def uuid(self):
        return "theirs"
"""


def ran(run: Run, arguments: str, before: str = "", **environ: str) -> tuple[Any, list[str], str]:
    """Return how many uses were placed, what failed in the rules, and what was printed."""
    outcome = run(PROGRAM.format(arguments=arguments, before=before), **environ)
    failures = [each for each in outcome.summary["failures"] if each.startswith("placement: ")]
    return outcome.summary["placed"], failures, outcome.output


@pytest.mark.slow
def test_backend_pygraph_applies_them_to_the_first_graph_of_a_process(run: Run) -> None:
    """Nothing has imported Inductor by then."""
    assert ran(run, "backend='pygraph'", PYGRAPH="")[:2] == (1, [])


@pytest.mark.slow
@pytest.mark.parametrize("pygraph", ["1", ""])
def test_a_pass_among_the_options_of_backend_pygraph_runs_beside_them(run: Run, pygraph: str) -> None:
    arguments = "backend='pygraph', options={'post_grad_custom_pre_pass': Theirs()}"

    placed, failures, output = ran(run, arguments, THEIRS, PYGRAPH=pygraph)

    assert (placed, failures) == (1, [])
    assert "theirs" in output


@pytest.mark.slow
@pytest.mark.parametrize("by_option", [True, False])
def test_a_pass_in_their_place_is_told_of_by_whoever_finds_the_graph_in_the_caches_too(
    run: Run, *, by_option: bool
) -> None:
    from pygraphd.client.placement import provenance

    arguments = "options={'post_grad_custom_pre_pass': Theirs()}" if by_option else "dynamic=False"
    before = THEIRS if by_option else f"{THEIRS}\ntorch._inductor.config.post_grad_custom_pre_pass = Theirs()"

    outcomes = [ran(run, arguments, before) for _ in range(2)]

    assert [each[:2] for each in outcomes] == [(0, [provenance.NOT_APPLIED])] * 2
    assert ["theirs" in each[2] for each in outcomes] == [True, False]


def test_without_the_rules_nobody_misses_them(run: Run) -> None:
    before = "import pygraphd.client.placement.upload"  # as if they had been there before

    assert ran(run, "dynamic=False", before, PYGRAPH_PLACEMENT="0")[:2] == (0, [])
