"""What importing costs: our name alone draws in nothing heavy, and `import torch` next to us nearly nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "triton",
    "numpy",
    "sqlalchemy",
    "alembic",
    "typer",
    "rich",
    "filelock",
    "psycopg",
}
PRINT_MODULES = "; import sys; print(*sys.modules)"


def modules_after(statement: str, **variables: str) -> set[str]:
    """Return what a new interpreter has imported after a statement."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYGRAPH")}
    finished = subprocess.run(
        [sys.executable, "-c", statement + PRINT_MODULES],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(finished.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "pygraphd",
        "pygraphd.client",
        "pygraphd.client.autoload",
        "pygraphd.schema",
        "pygraphd.schema.policy",
        "pygraphd.cli.run",
    ],
)
def test_importing_ours_imports_nothing_heavy(module: str) -> None:
    imported = modules_after(f"import {module}")

    assert module in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("module", ["pygraphd.client.decisions.cache", "pygraphd.client.hook"])
def test_hook_imports_no_database_and_no_torch(module: str) -> None:
    imported = modules_after(f"import {module}")

    assert module in imported
    assert not imported & HEAVY


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("variables", [{}, {"PYGRAPH": ""}, {"PYGRAPH": "0"}])
def test_importing_torch_imports_only_the_switch(variables: dict[str, str]) -> None:
    imported = modules_after("import torch", **variables)

    ours = {name for name in imported if name.partition(".")[0] == "pygraphd"}
    assert {name for name in ours if name.startswith("pygraphd.client.")} == {"pygraphd.client.autoload"}
    assert len(ours) <= 6, ours  # and what a version number takes


@pytest.mark.slow
@pytest.mark.torch
def test_switched_on_import_of_torch_still_imports_no_compiler() -> None:
    imported = modules_after("import torch", PYGRAPH="1", PYGRAPHD_AUTOSTART="0")

    assert "pygraphd.client.hook" in imported
    assert "torch._inductor.compile_fx" not in imported
    assert not imported & {"sqlalchemy", "alembic", "typer", "rich", "filelock"}
