"""The text of `pygraphd doctor`: a line for each check, and a block for each pattern of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.cli.wrapping import folded, terminal_width, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pygraphd.cli.doctor import Check
    from pygraphd.cli.doctor_patterns import Finding

MAX_SEEN = 8
"""Reasons of one pattern that are listed."""
_WIDTH = 100
"""Columns of a remedy outside of a terminal."""

_TO_DO = len("to do: ")


def checks_text(checks: Sequence[Check]) -> str:
    """Return one line for each check, and below it what to do."""
    return "\n".join(line for check in checks for line in _check(check))


def _check(check: Check) -> Iterator[str]:
    yield wrapped(f"{'OK' if check.is_ok else '!!'}  {check.name:<14}  {check.found}", 20)
    if not check.is_ok:
        yield from _folded(f"to do: {check.remedy}", 20)


def findings_text(findings: Sequence[Finding], source: Path, program: str) -> str:
    """Return the patterns of a program, by its summary `source`."""
    of = f"{program} ({source})" if program else str(source)
    if not findings:
        return wrapped(f"{of}: nothing keeps kernels out of CUDA graphs, as far as its summary tells", 2)
    blocks = ["\n".join(_finding(finding)) for finding in findings]
    return "\n\n".join([wrapped(f"{of}: what keeps kernels out of CUDA graphs", 2), *blocks])


def _finding(finding: Finding) -> Iterator[str]:
    yield finding.name
    for text, times in finding.seen[:MAX_SEEN]:
        yield wrapped(f"  - {text}{f' ({times} times)' if times > 1 else ''}", 4)
    if (more := len(finding.seen) - MAX_SEEN) > 0:
        yield f"  - and {more} more"
    yield from _folded(f"to do: {finding.remedy}", 2)


def _folded(text: str, indent: int) -> Iterator[str]:
    return folded(f"{' ' * indent}{text}", indent + _TO_DO, terminal_width() or _WIDTH)
