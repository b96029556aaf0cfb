"""The page of a report in a real browser: its plots show the figures, its texts lie where they can be read, and it asks for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import report_html
from pygraphd.cli.report import report
from pygraphd.cli.summaries import read_summary
from pygraphd.schema.locations import locate
from tests.support.browser import Browser

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.cli.report import Report

EXAMPLE = "docs/report-example.json"
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}
BARS = """[...document.querySelectorAll("svg")[0].querySelectorAll("rect")].map(each => {
    const box = each.getBoundingClientRect();
    return {y: Math.round(box.y), width: box.width, fill: getComputedStyle(each).fill};
})"""
TEXTS = """[...document.querySelectorAll("svg text")].map(each => {
    const box = each.getBoundingClientRect(), svg = each.ownerSVGElement.getBoundingClientRect();
    return {text: each.textContent, x: box.x, y: box.y, right: box.right, bottom: box.bottom,
            inside: box.x >= svg.x && box.right <= svg.right && box.y >= svg.y && box.bottom <= svg.bottom};
})"""
LINES = """Object.fromEntries(["gain", "cost"].map(name => {
    const box = document.querySelector(`svg line.${name}`).getBoundingClientRect();
    return [name, {x: box.x, y: box.y, right: box.right, bottom: box.bottom}];
}))"""
DOT = """(() => { const box = document.querySelector("svg circle").getBoundingClientRect();
    return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def made(tmp_path: Path, pytestconfig: pytest.Config) -> Report:
    summary = read_summary(pytestconfig.rootpath / EXAMPLE)
    return report(summary, locate({"PYGRAPHD_HOME": str(tmp_path / "home")}))


@pytest.fixture
def page(made: Report, tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    report_html.write(path, report_html.page(made))
    return path


@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_it_can_be_read_in_both_schemes_and_asks_for_nothing(
    browser: Browser, page: Path, scheme: str
) -> None:
    browser.show(page, width=1280, height=900, scheme=scheme)

    assert browser.value("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[scheme]
    texts = browser.value(TEXTS)
    assert [each["text"] for each in texts if not each["inside"]] == []
    for number, one in enumerate(texts):
        for other in texts[number + 1 :]:
            apart = one["right"] <= other["x"] or other["right"] <= one["x"]
            assert apart or one["bottom"] <= other["y"] + 1 or other["bottom"] <= one["y"] + 1, (one, other)
    for width in (1280, 900, 400):
        browser.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        assert browser.value("document.documentElement.scrollWidth") <= width
    requests = [each for each in browser.events if each["method"] == "Network.requestWillBeSent"]
    assert [each["params"]["request"]["url"] for each in requests] in ([], [page.as_uri()])
    assert [each for each in browser.events if each["method"] == "Log.entryAdded"] == []


def test_no_column_of_the_table_is_cut_off(browser: Browser, page: Path) -> None:
    browser.show(page, width=960, height=900, scheme="light")
    shown, whole = browser.value(
        '(({clientWidth, scrollWidth}) => [clientWidth, scrollWidth])(document.querySelector(".wide"))'
    )
    assert whole <= shown


def test_the_bars_are_as_long_as_the_times(browser: Browser, page: Path, made: Report) -> None:
    browser.show(page, width=1280, height=900, scheme="light")

    bars = browser.value(BARS)

    by_line: dict[int, list[float]] = {}
    for bar in bars:
        by_line.setdefault(bar["y"], []).append(bar["width"] + 1.5 * _scale(browser))
    kernels, ran = (by_line[y] for y in sorted(by_line))
    per_ms = sum(kernels) / made.without_ms
    assert sum(ran) == pytest.approx(made.with_ms * per_ms, rel=0.01)
    assert ran == [pytest.approx((row.step_ms or 0) * per_ms, rel=0.02) for row in made.compared]
    fills = [bar["fill"] for bar in bars]
    assert len(set(fills)) == len(kernels) == len(made.compared)
    assert "rgba(0, 0, 0, 0)" not in fills


def test_gain_and_cost_meet_where_the_cost_is_paid_back(browser: Browser, page: Path) -> None:
    browser.show(page, width=1280, height=900, scheme="light")

    lines, dot = browser.value(LINES), browser.value(DOT)

    gain, cost = lines["gain"], lines["cost"]
    at = (gain["bottom"] - cost["y"]) / (gain["bottom"] - gain["y"])
    assert dot["y"] == pytest.approx(cost["y"], abs=2)
    assert dot["x"] == pytest.approx(gain["x"] + at * (gain["right"] - gain["x"]), abs=3)


def _scale(browser: Browser) -> float:
    return float(browser.value('document.querySelector("svg").getBoundingClientRect().width')) / 720
