"""The prose of README and docs: short sentences, no commit ids, and files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MAX_WORDS = 35
ROOMS = [ROOT, ROOT / "client", *(path for path in sorted((ROOT / "client").iterdir()) if path.is_dir())]
"""Folders that a page may name a file relative to."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+|^#+ .*$|^    .*$|\|", re.MULTILINE)
_COMMIT = re.compile(r"(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])\b[0-9a-f]{7,40}\b")
_FILE = re.compile(r"`([\w./]+\.(?:py|c|h|md|svg))(?:: (\w+))?`")
_NAME_IN_FILE = re.compile(r"`(\w+)`(?: \([^)]*\))? in\s+`([\w./]+\.(?:py|c|h))`")
_PLACEHOLDERS = ("000", "torch/")
"""Beginnings of names that stand for files elsewhere."""
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page: paragraphs, list items, and cells of tables, without code blocks."""
    for block in _BLOCK.split(_FENCE.sub("", markdown)):
        yield from filter(None, re.split(r"(?<=[.!?])\s+", " ".join(block.split())))


def commit_ids(markdown: str) -> list[str]:
    """Return what looks like an abbreviated or whole commit id, outside of code blocks."""
    return _COMMIT.findall(_FENCE.sub("", markdown))


def missing_files(markdown: str, folder: Path) -> list[str]:
    """Return the files that a page in `folder` names or links to and that are nowhere, or lack the name of `file: name`, or of `name` in `file`."""
    prose = _FENCE.sub("", markdown)
    named = [pair for pair in _FILE.findall(prose) if not pair[0].startswith(_PLACEHOLDERS)]
    named += [(file, name) for name, file in _NAME_IN_FILE.findall(prose)]
    linked = [name for name in _LINK.findall(markdown) if not (folder / name).exists()]
    return [file for file, name in named if not any(_has(root / file, name) for root in ROOMS)] + linked


def _has(file: Path, name: str) -> bool:
    return file.is_file() and (not name or re.search(rf"\b{name}\b", file.read_text()) is not None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_too_long(page: Path) -> None:
    long = [each for each in sentences(page.read_text()) if len(each.split()) > MAX_WORDS]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_commit_is_named(page: Path) -> None:
    assert commit_ids(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_are_named_exist(page: Path) -> None:
    assert missing_files(page.read_text(), page.parent) == []


def test_long_sentences_are_found_in_each_kind_of_block() -> None:
    long = "word " * 36 + "end."
    for page in (
        f"Short. {long}",
        f"- item\n- {long}",
        f"| a | b |\n| --- | --- |\n| c | {long} |",
        f"1. {long}\n2. x",
    ):
        assert [each for each in sentences(page) if len(each.split()) > MAX_WORDS], page


def test_code_blocks_are_no_prose() -> None:
    page = f"```\n{'word ' * 40}\n```\n\n    {'word ' * 40}\n\nShort."
    assert [each for each in sentences(page) if len(each.split()) > MAX_WORDS] == []


def test_commit_ids_and_missing_files_are_found() -> None:
    assert commit_ids("as of 380b371, decided 1234567 times by feedback") == ["380b371"]
    assert missing_files("`nowhere.py` and [a page](nowhere.md), `README.md`", ROOT) == [
        "nowhere.py",
        "nowhere.md",
    ]
    assert missing_files("`no_such` (2 s) in `client/hook.py`, `enable` in\n`client/hook.py`", ROOT) == [
        "client/hook.py"
    ]
