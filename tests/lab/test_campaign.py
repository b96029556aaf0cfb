"""Steps within a time limit, of real processes: what runs when, what is ended and what is left of it, and what is said."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import processes
from benchmarks.errors import BenchmarkError
from tests.support.gone_processes import is_gone
from tests.support.stepped_clock import LateOnce, Ticking
from tools.lab.campaign import (
    GRACE_S,
    MAX_FILES,
    MAX_LINES,
    NOT_BEGUN,
    Campaign,
    Done,
    shares,
    summary,
)
from tools.lab.campaign_steps import SECONDS, Command, Step

ROOT = Path(__file__).resolve().parents[2]


def step(name: str, *programs: str, limit_s: float = 30.0, **more: Any) -> Step:
    """Return a step of Python programs that run side by side."""
    return Step(name, limit_s, tuple(Command(("-c", program)) for program in programs), **more)


def campaign(out: Path, *steps: Step, end_s: float = 100.0) -> Campaign:
    return Campaign(steps, out, end_s, "abc")


def executed(out: Path, *steps: Step, end_s: float = 100.0) -> list[Done]:
    made = campaign(out, *steps, end_s=end_s)
    made.execute()
    return made.done


def outcomes(done: list[Done]) -> list[tuple[str, str | None]]:
    return [(each.step.name, each.error) for each in done]


def log(out: Path) -> str:
    return (out / "campaign.log").read_text()


TOGETHER = """
import pathlib, time
mine, others = map(pathlib.Path, ({mine!r}, {others!r}))
mine.touch()
while not others.exists(): time.sleep(0.02)
"""
NOTE = "import time; open({file!r}, 'a').write('{name} begins\\n'); time.sleep(0.3); open({file!r}, 'a').write('{name} ends\\n')"


def test_steps_run_one_after_the_other_and_their_commands_side_by_side(tmp_path: Path) -> None:
    first, second, order = (str(tmp_path / name) for name in ("first", "second", "order"))

    done = executed(
        tmp_path / "out",
        step(
            "meeting", TOGETHER.format(mine=first, others=second), TOGETHER.format(mine=second, others=first)
        ),
        step("a", NOTE.format(file=order, name="a")),
        step("b", NOTE.format(file=order, name="b")),
    )

    assert outcomes(done) == [("meeting", None), ("a", None), ("b", None)]
    assert Path(order).read_text().splitlines() == ["a begins", "a ends", "b begins", "b ends"]
    assert min(each.seconds for each in done[1:]) >= 0.3


def test_a_step_that_fails_costs_no_other_and_its_report_is_made_all_the_same(tmp_path: Path) -> None:
    made = campaign(
        tmp_path,
        step(
            "bad", "print('begun'); raise ValueError('no')", report=Command(("-c", "print('2 of 3 failed')"))
        ),
        step("good", "print('fine')"),
    )

    made.execute()

    assert outcomes(made.done) == [("bad", "ValueError: no"), ("good", None)]
    assert made.failed
    assert [each.lines for each in made.done] == [("2 of 3 failed",), ("fine",)]
    assert "begun\n" in log(tmp_path)


def test_a_report_that_says_no_is_a_failure(tmp_path: Path) -> None:
    (done,) = executed(
        tmp_path, step("found", "pass", report=Command(("-c", "print('SLOWER'); raise SystemExit(1)")))
    )

    assert (done.error, done.lines) == ("SLOWER", ("SLOWER",))


def test_a_report_that_sums_up_says_what_failed(tmp_path: Path) -> None:
    report = Command(("-c", "print('test_it: no'); print('1 failed, 2 passed')"))

    failed, good = executed(
        tmp_path,
        step("tests", "raise ValueError('the last of many')", report=report, sums_up=True),
        step("tests", "pass", report=report, sums_up=True),
    )

    assert failed.error == "1 failed, 2 passed"
    assert good.error is None


LATE = """
import json, pathlib, signal, sys, time
def end(*_):
    print("put in order")
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("measured half", flush=True)
pathlib.Path({file!r}).write_text(json.dumps(["half"]))
time.sleep(6000)
"""


@pytest.mark.torch  # it takes seconds
def test_a_late_step_is_ended_and_what_it_has_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "1-late.json"
    monkeypatch.setattr(
        processes, "time", LateOnce(lambda: result.exists() and result.read_text().endswith("]"))
    )

    done = executed(
        tmp_path,
        step(
            "late",
            LATE.format(file=str(result)),
            limit_s=2.0,
            result=result,
            report=Command(("-c", "print('half')")),
        ),
        step("next", "print('there was time')"),
    )

    assert outcomes(done) == [("late", "killed: not done after 2 s"), ("next", None)]
    assert done[0].lines == ("half",)
    assert json.loads(result.read_text()) == ["half"]
    assert "measured half\nput in order\n" in log(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1-late.json", "campaign.log"]


@pytest.mark.torch  # it takes seconds
def test_what_a_process_has_printed_is_there_if_it_had_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.lab.campaign.GRACE_S", 0.5)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('so far'); time.sleep(6000)"
    printed = tmp_path / "1-deaf.0.log"
    monkeypatch.setattr(
        processes, "time", LateOnce(lambda: printed.exists() and printed.read_text() == "so far\n")
    )

    (done,) = executed(tmp_path, step("deaf", program, limit_s=2.0))

    assert done.error == "killed: not done after 2 s"
    assert done.lines == ("so far",)


@pytest.mark.torch  # it takes seconds
def test_the_end_of_the_campaign_ends_a_step_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.lab.campaign.LEAST_S", 200.0)
    clock = Ticking(30.0)
    for module in ("tools.lab.campaign", "benchmarks.processes"):
        monkeypatch.setattr(f"{module}.time", clock)

    done = executed(
        tmp_path,
        step("long", "import time; time.sleep(6000)", limit_s=1000),
        step("none", "pass"),
        end_s=GRACE_S + 300,
    )

    assert (done[0].error or "").startswith("killed: not done after ")
    assert outcomes(done)[1] == ("none", NOT_BEGUN)
    assert done[1].seconds < 200


def test_a_command_is_told_how_long_it_may_take(tmp_path: Path) -> None:
    told = Command(("-c", "import sys; print(sys.argv[1:])", "--budget-s", SECONDS))

    (by_itself,) = executed(tmp_path, Step("told", 25.9, (told,)))
    (by_the_end,) = executed(tmp_path, Step("told", 500.0, (told,)), end_s=60)

    assert by_itself.lines == ("['--budget-s', '25']",)
    assert by_the_end.lines == ("['--budget-s', '39']",)


def test_processes_have_the_commit_and_what_their_step_sets(tmp_path: Path) -> None:
    program = "import os; print(os.environ['BENCHMARK_COMMIT'], os.environ['MORE'])"

    (done,) = executed(tmp_path, Step("told", 30.0, (Command(("-c", program), (("MORE", "x"),)),)))

    assert done.lines == ("abc x",)


def test_the_log_has_the_end_of_what_is_too_long(tmp_path: Path) -> None:
    executed(tmp_path, step("loud", "print('first'); print('x' * (1 << 20)); print('last')"))

    text = log(tmp_path)
    assert "(12 characters before this are left out)\n" in text
    assert "first" not in text.partition("characters before this")[2]
    assert text.rstrip().endswith("last")


def test_more_files_than_come_back_are_refused_before_anything_runs(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    steps = [
        step("a", f"open({str(seen)!r}, 'w')", result=tmp_path / f"{number}.json")
        for number in range(MAX_FILES - 1)
    ]
    two = step("b", "pass", "pass")

    with pytest.raises(BenchmarkError, match="leave up to 9 files, and 8 come back"):
        campaign(tmp_path, *steps, step("b", "pass")).execute()
    with pytest.raises(BenchmarkError, match="leave up to 9 files"):
        campaign(tmp_path, *steps[1:], two).execute()

    assert not seen.exists()


def test_results_of_another_campaign_are_not_taken_for_its_own(tmp_path: Path) -> None:
    old = tmp_path / "1-a.json"
    old.write_text("old")

    with pytest.raises(BenchmarkError, match=r"has 1-a\.json already: name another folder"):
        executed(tmp_path, step("a", "pass", result=old))

    assert [each.name for each in tmp_path.iterdir()] == ["1-a.json"]


@pytest.mark.torch  # it takes seconds
@pytest.mark.parametrize("to", ["SIGTERM", "SIGINT"])
def test_a_campaign_that_is_ended_ends_its_processes_and_says_what_there_is(tmp_path: Path, to: str) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = f"""
import signal, pathlib
from tools.lab.campaign import Campaign, summary
from tools.lab.campaign_steps import Command, Step
for each in (signal.SIGTERM, signal.SIGINT):  # which a shell may have had ignored in the background
    signal.signal(each, signal.default_int_handler)
steps = [Step("short", 30, (Command(("-c", "print('measured')")),)), Step("long", 60, (Command(("-c", {child!r})),) * 2)]
campaign = Campaign(steps, pathlib.Path({str(tmp_path)!r}), 100, "abc")
try:
    campaign.execute()
finally:
    print(summary(campaign))
"""
    logs = [tmp_path / f"2-long.{number}.log" for number in range(2)]
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not all(each.exists() and each.read_text().endswith("\n") for each in logs):
            assert process.poll() is None
            time.sleep(0.02)
        pids = [int(each.read_text()) for each in logs]
        process.send_signal(getattr(signal, to))
        output, _ = process.communicate(timeout=60)

    assert all(map(is_gone, pids))
    assert [line.split()[-1] for line in output.splitlines()[1:3]] == ["done", "interrupted"]
    assert output.splitlines()[3:] == ["-- short", "measured"]
    assert all(str(pid) in log(tmp_path) for pid in pids)
    assert [each.name for each in tmp_path.iterdir()] == ["campaign.log"]


# --- what is said ------------------------------------------------------------------------------------------------


def said(tmp_path: Path, *done: Done) -> list[str]:
    made = campaign(tmp_path, *(each.step for each in done))
    made.done.extend(done)
    return summary(made).splitlines()


def test_a_line_for_each_step_and_then_what_it_came_to(tmp_path: Path) -> None:
    there, missing = tmp_path / "1-a.json", tmp_path / "2-b.json"
    there.touch()

    lines = said(
        tmp_path,
        Done(step("a", result=there), None, 3.4, ("one", "two")),
        Done(step("b", result=missing), "ValueError: no", 12.0),
        Done(step("c"), NOT_BEGUN, 0.0),
    )

    assert [line.split(maxsplit=3) for line in lines[1:4]] == [
        ["a", "3", "1-a.json", "done"],
        ["b", "12", "-", "ValueError: no"],
        ["c", "0", "-", NOT_BEGUN],
    ]
    assert lines[4:] == ["-- a", "one", "two"]


def test_only_lines_that_tell_something_are_repeated(tmp_path: Path) -> None:
    (done,) = executed(
        tmp_path, step("demo", "print('a: 1'); print('noise'); print('b: 2')", telling="a: |b: ")
    )

    assert done.lines == ("a: 1", "b: 2")


@given(
    counts=st.lists(st.integers(0, 80), max_size=8),
    width=st.integers(1, 400),
)
def test_never_more_lines_than_come_back_and_the_last_of_each(counts: list[int], width: int) -> None:
    done = [
        Done(
            step(f"step {index}"),
            None,
            1.0,
            tuple(f"{index}.{number} ".ljust(width, "x") for number in range(count)),
        )
        for index, count in enumerate(counts)
    ]

    lines = said(Path("nowhere"), *done)

    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= 190
    for index, count in enumerate(counts):
        assert any(line.startswith(f"step {index} ") for line in lines)
        shown = [line for line in lines if line.startswith(f"{index}.")]
        numbers = [int(line.split()[0].partition(".")[2]) for line in shown]
        assert numbers == list(range(count - len(numbers), count))
        left_out = f"({count - len(numbers)} lines before these are in campaign.log)"
        assert (left_out in lines) is (len(numbers) < count)


@given(st.lists(st.integers(0, 50)), st.integers(0, 100))
def test_room_is_dealt_out_evenly_and_none_is_left_that_is_wanted(wanted: list[int], room: int) -> None:
    given_out = shares(wanted, room)

    assert sum(given_out) == min(sum(wanted), room)
    assert all(got <= most for got, most in zip(given_out, wanted, strict=True))
    fully = max((got for got, most in zip(given_out, wanted, strict=True)), default=0)
    assert all(got == most or got >= fully - 1 for got, most in zip(given_out, wanted, strict=True))
