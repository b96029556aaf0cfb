from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import WORKLOADS
from tools.lab import SYNTHETIC, synthetic

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["wide-inference", "deep-inference"])
def test_a_workload_of_the_lab_is_built_by_its_name(name: str) -> None:
    case = WORKLOADS[name].build(torch.device("cpu"))

    assert case.call(case.module, case.draw(torch.Generator())).shape[0] == 64


def test_every_source_is_there() -> None:
    assert all(hasattr(synthetic, each.source.partition(":")[2]) for each in SYNTHETIC)
