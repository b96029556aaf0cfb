"""Decisions that come with the package: which are found, what ranks above them, and files that are refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema import policy, shipped
from pygraphd.schema.messages import Deployment, Entry, LookupRequest, Measurement
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import MAX_LINE_BYTES
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.shipped_rows import FASTER, H100, KERNELS, digest, row, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOISY = Measurement(Deployment.GRAPH, 8, 98.0, 60.0, 85.0, 78.0, 0.25, 60.0, 60.0)


def request(*names: str) -> LookupRequest:
    return LookupRequest(H100.digest(), tuple(map(digest, names)))


def test_a_decision_is_found_by_its_whole_key(tmp_path: Path) -> None:
    written(tmp_path, row("a", KERNELS, FASTER), row("b", KERNELS, FASTER))
    written(tmp_path, row("c", KERNELS, FASTER, gpu="NVIDIA H200"), name="h200")

    read = shipped.load(tmp_path)
    (found,) = read.for_unanswered(request("a", "c", "d"), ())

    assert read.problems == ()
    assert found.entry == Entry(
        digest("a"), row("a", KERNELS, FASTER).record.decision, None, "shipped:lab", 50.0, 1e9, 20.0, 40.0
    )
    assert digest("c") in read.graphs  # known, but in another environment


def test_only_the_graphs_that_are_asked_for_are_read(tmp_path: Path) -> None:
    written(tmp_path, *(row(name, KERNELS, FASTER) for name in "abc"))

    assert set(shipped.load(tmp_path, [digest("b"), digest("z")]).known) == {(H100.digest(), digest("b"))}


@pytest.mark.parametrize(
    ("final", "measured_at", "wins"),
    [(True, None, True), (True, 1.0, True), (False, 1.0, True), (False, None, False)],
)
def test_what_was_found_out_here_ranks_above_unless_it_is_a_guess(
    tmp_path: Path, final: bool, measured_at: float | None, wins: bool
) -> None:
    written(tmp_path, row("a", KERNELS, FASTER))
    decision = policy.only_kernels(Reason(ReasonCode.TOO_FEW_CALLS), final=final)
    own = Entry(digest("a"), decision, os.getuid(), "here", measured_at=measured_at)

    assert bool(shipped.load(tmp_path).for_unanswered(request("a"), shipped.answered([own]))) is not wins


def test_what_an_older_policy_has_decided_is_decided_anew_or_left_out(tmp_path: Path) -> None:
    written(
        tmp_path,
        row("sure", KERNELS, FASTER, version=1),
        row("noisy", KERNELS, NOISY, version=1),
        row("unmeasured", version=1),
    )

    (found,) = shipped.load(tmp_path).known.values()

    assert (found.entry.graph, found.entry.decision.policy) == (digest("sure"), POLICY_VERSION)
    assert found.entry.decision.calls == 22


def test_a_hit_saves_what_a_trial_would_have_cost(tmp_path: Path) -> None:
    written(tmp_path, row("a", KERNELS, FASTER))

    (found,) = shipped.load(tmp_path).known.values()

    assert (found.measuring_us, found.recording_us) == (8 * 70.0, 0.0)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[:-20], "line 3: the file ends here, too early"),
    "longer": (lambda data: data + b"{}\n", "more lines than it says"),
    "huge": (lambda data: data.replace(b'"entries":2', b'"entries":2000000'), "2000000 entries, at most"),
    "newer": (lambda data: data.replace(b'"version":3', b'"version":4'), "names graphs otherwise"),
    "other keys": (lambda data: data.replace(b'"keys":2', b'"keys":1'), "names graphs otherwise"),
    "not finite": (lambda data: data.replace(b"100.0", b"NaN"), "line 2: median_us"),
    "deep": (lambda data: data.replace(b"100.0", b"[" * 20_000), "recursion"),
    "escape codes": (lambda data: data.replace(b'"lab"', b'"\\u001b[2J"'), "control characters"),
    "long line": (lambda data: data.replace(b"lab", b"x" * MAX_LINE_BYTES), "more than"),
    "binary": (lambda data: bytes(len(data)), "too early"),
    "empty": (lambda data: b"", "too early"),
}


@pytest.mark.parametrize("kind", [*DAMAGE, "pipe"])
def test_a_damaged_file_is_refused_with_the_reason_and_the_others_are_used(tmp_path: Path, kind: str) -> None:
    bad = written(tmp_path, row("a", KERNELS, FASTER), row("b", KERNELS, FASTER), name="bad")
    written(tmp_path, row("c", KERNELS, FASTER), name="good")
    if kind == "pipe":
        why = "is not a regular file"
        bad.unlink()
        os.mkfifo(bad)
    else:
        damage, why = DAMAGE[kind]
        bad.write_bytes(damage(bad.read_bytes()))

    read = shipped.load(tmp_path)

    (problem,) = read.problems
    assert problem.startswith(f"{bad}: ")
    assert why in problem
    assert [graph for _, graph in read.known] == [digest("c")]


@pytest.mark.parametrize("text", ["", "1", "on", "package"])
def test_the_packages_own_are_the_usual(text: str) -> None:
    where = shipped.folder(text)
    assert where is not None
    assert (where.name, where.parent.name) == ("shipped", "pygraphd")


def test_none_or_another_folder_may_be_asked_for(tmp_path: Path) -> None:
    assert shipped.folder("0") is shipped.folder("off") is None
    assert shipped.load(shipped.folder("0")) == shipped.Shipped()
    assert shipped.folder(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="absolute path"):
        shipped.folder("fasle")
    (problem,) = shipped.load(tmp_path / "missing").problems
    assert "is no folder" in problem


def test_what_the_package_ships_can_be_relied_on() -> None:
    """That is: it is whole, was measured on a GPU, is final by the present policy, and names nobody's host."""
    read = shipped.load(shipped.folder(shipped.PACKAGE))

    assert read.problems == ()
    for known in read.known.values():
        assert known.row.environment.gpu != "none"
        assert known.row.origin.host == "shipped:pygraphd"
        assert policy.decide(known.row.record.measurements).final
