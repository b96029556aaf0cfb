"""Exceptions of our own code do not reach the user's program."""

from __future__ import annotations

import pytest

from pygraphd.client.common.guard import MAX_CHARACTERS, guarded
from pygraphd.client.common.report import Report


def fail() -> int:
    raise ValueError("no " + 300 * "x")


def test_a_result_is_passed_on_and_an_exception_is_counted() -> None:
    report = Report()

    assert guarded(report, "trying")(lambda: 1) == 1
    assert guarded(report, "trying")(fail) is None
    with guarded(report, "trying"):
        fail()

    assert report.failures == {"trying: ValueError": 2}


def test_its_text_is_counted_if_asked_for() -> None:
    report = Report()

    guarded(report, "trying", in_full=True)(fail)

    (reason,) = report.failures
    assert reason.startswith("trying: ValueError: no xxx")
    assert len(reason) == MAX_CHARACTERS


def test_without_a_report_it_is_a_line_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    guarded(None, "trying")(fail)

    assert capfd.readouterr().err == "pygraph: trying: ValueError\n"


def test_an_interrupt_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt), guarded(Report(), "trying"):
        raise KeyboardInterrupt
