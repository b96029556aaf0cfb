"""The repository's root, and those of its packages that are not installed.

They are loaded from their folders: the root must not be on sys.path for them, since its folder `alembic` would hide the library of that name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_package(name: str) -> None:
    """Make a package importable that lies in the root."""
    if name in sys.modules:
        return
    folder = ROOT / name
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
