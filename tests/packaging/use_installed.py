"""Run by try_wheel.sh in a bare environment: is what the wheel installed whole, and does it leave others alone?

With a path it instead checks the summary of a second run there: all graphs known, none measured, a daemon at work.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path


def check_installed() -> None:
    schema = importlib.import_module("schema")  # theirs; the checkout has a folder of that name too

    assert schema.Schema(int).validate(1) == 1
    import pygraphd

    assert "site-packages" in pygraphd.__file__, pygraphd.__file__
    for group in ("torch.backends", "torch_dynamo_backends"):
        (point,) = entry_points(group=group, name="pygraph")
        assert callable(point.load()), point
    import torch

    assert "pygraph" in torch.compiler.list_backends(exclude_tags=None)
    print(f"pygraphd {pygraphd.__version__} installed whole, PyPI's schema beside it intact")


def check_helper_compiles() -> None:
    """The C helper is compiled from the installed sources, and loaded as a program with a GPU does."""
    from pygraphd.client.replay.native import build

    path = build.place(Path(os.environ["PYGRAPHD_HOME"]))
    assert build.compile_once(path) is None
    helper = build.load(path)
    assert not isinstance(helper, str), helper
    print("the C helper compiled from the installed sources, and loaded")


def check_summary(path: Path) -> None:
    summary = json.loads(path.read_text())
    assert summary["graphs"] > 0, summary
    assert summary["hits"] == summary["graphs"], summary
    assert summary["measured"] == 0, summary
    assert summary["daemon"]["version"], summary
    print(f"second run: {summary['hits']} of {summary['graphs']} graphs known, none measured")


def check_all() -> None:
    check_installed()
    check_helper_compiles()


if __name__ == "__main__":
    check_summary(Path(sys.argv[1])) if len(sys.argv) > 1 else check_all()
