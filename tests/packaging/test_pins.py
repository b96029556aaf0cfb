"""Pins that a torch we support would refuse: pip would then not install it into the environment that `make` creates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


@pytest.mark.parametrize("file", ["runtime.txt", "wheel.txt"])
def test_setuptools_is_one_that_torch_2_11_accepts(file: str) -> None:
    """It asks for setuptools below 82; ours asks for 77 at least."""
    [pin] = re.findall(r"(?m)^setuptools==(\d+)\.", (REQUIREMENTS / file).read_text())

    assert 77 <= int(pin) < 82
