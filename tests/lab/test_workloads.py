from __future__ import annotations

import pkgutil

import pytest
import torch

from benchmarks.workloads import WORKLOADS
from tools.lab import OURS

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["wide-inference", "deep-inference"])
def test_a_workload_of_the_lab_is_built_by_its_name(name: str) -> None:
    case = WORKLOADS[name].build(torch.device("cpu"))

    assert case.call(case.module, case.draw(torch.Generator())).shape[0] == 64


def test_every_source_is_there() -> None:
    assert all(callable(pkgutil.resolve_name(each.source)) for each in OURS)
