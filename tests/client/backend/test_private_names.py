"""Private names of torch are used in `client/backend/torch_private/` alone, where a contract test looks at them; operators are no such names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENT = Path(__file__).parents[3] / "client"
OTHERS = sorted(each for each in CLIENT.rglob("*.py") if CLIENT / "backend/torch_private" not in each.parents)


def private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        yield from (name for name in names if name.startswith("torch.") and _is_private(name))


def _is_private(name: str) -> bool:
    parts = name.split(".")
    is_name = all(part.isidentifier() for part in parts) and parts[1] != "ops"
    return is_name and any(part.startswith("_") and not part.startswith("__") for part in parts)


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: str(file.relative_to(CLIENT)))
def test_no_other_file_names_what_is_private(file: Path) -> None:
    assert sorted(set(private_names(ast.parse(file.read_text())))) == []


@pytest.mark.parametrize(
    "code",
    ["torch._ops.OpOverload", "x = [torch._C]", "import torch._inductor", "from torch._dynamo import config"],
)
def test_what_is_private_is_found(code: str) -> None:
    assert list(private_names(ast.parse(code)))
