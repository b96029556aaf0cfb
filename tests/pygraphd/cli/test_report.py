"""A report says of a summary what is known of coverage, gain and cost, and nothing else; its page refers to nothing outside."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pygraphd.cli import report_html, summary_files
from pygraphd.cli.report import Report, report
from pygraphd.cli.report_text import headline, report_text
from pygraphd.cli.summaries import HOW, read_summary
from pygraphd.client.common.report import Report as Written
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import MAX_COUNT, Decision, Deployment, Graph, Kind, Measurement
from pygraphd.schema.policy import only_kernels
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source
from tests.support.cli_command import pygraphd

HERE = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.2", "91400")
FASTER = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)
VOID = {"meta", "br"}
HOSTILE = "L['self']/<script>alert(1)</script>"


def graph(digit: str) -> Graph:
    return Graph(digit * 64, Kind.FORWARD, 0, 1, 9)


def measured(deployment: Deployment, host_us: float, span_us: float) -> Measurement:
    return Measurement(deployment, 12, 999.0, 1.0, host_us, span_us, 0.0)


def both(kernels_us: float, graph_us: float) -> list[Measurement]:
    return [
        measured(Deployment.KERNELS, kernels_us, 1.0),
        measured(Deployment.GRAPH, 1.0, graph_us),
    ]


def a_program(launches: int | None = 3) -> Written:
    """Two equal layers, a graph with two sizes, and one that is not recorded, whose generated code calls `launches` kernels."""
    made = Written()
    layer, sized, custom = graph("a"), graph("b"), graph("c")
    made.note_graph(layer.digest, module=HOSTILE, places=["/x/train.py:7 in forward"], operators=9)
    for _ in range(2):
        made.record_deployment(layer, HERE, FASTER, Source.MEASURED, measured=both(1000.0, 400.0))
    made.note_graph(layer.digest, nodes=20, memory_bytes=3 * 2**20)
    made.note_graph(sized.digest, module="L['self']/tail")
    made.record_deployment(sized, HERE, only_kernels(Reason(ReasonCode.DECIDED_BY_SIZE)), Source.RULE)
    for size, nodes in ((8, 4), (16, 6)):
        made.note_graph(sized.digest, (size,), nodes=nodes, memory_bytes=1)
        made.record_deployment(sized.at((size,)), HERE, FASTER, Source.MEASURED, measured=both(300.0, 100.0))
    why = only_kernels(Reason(ReasonCode.CUSTOM_OPERATORS, "mine::rope"))
    made.note_graph(custom.digest, launches=launches)
    made.record_deployment(custom, HERE, why, Source.RULE)
    made.measuring_ms, made.recording_ms = 1000.0, 400.0
    made.note("graph_breaks", "Tensor.item() (train.py:3)")
    return made


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path / "home")})


def read_back(written: Written, tmp_path: Path, locations: Locations) -> Report:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(written.summary()))
    return report(read_summary(file), locations)


def test_the_first_lines_say_what_is_known_of_a_step(tmp_path: Path, locations: Locations) -> None:
    made = read_back(a_program(), tmp_path, locations)

    lines = dict(headline(made))

    # Two layers of 20 kernels, and the mean of 4 and 6 at the sizes.
    assert lines["coverage"] == "45 of 48 kernels a step in 3 graphs"
    assert lines["gain"] == "1.400 ms a step, 60.9%: 2.300 -> 0.900 ms (3 of 4 graphs measured)"
    assert lines["cost"] == (
        "1.40 s once (1.00 s measuring, 400.0 ms recording); paid back after 1000 steps; up to 3.0 MiB in a call"
    )
    text = report_text(made)
    assert "tail\n     GRAPH: GRAPH is faster (measured by this program)" in text
    assert "at 8" in text
    assert "forward, 2 alike" in text
    assert "Tensor.item() (train.py:3)" in text


@pytest.mark.parametrize(
    ("limit", "refused", "said"),
    [
        (0, 0, "recording asked for up to 96.0 MiB"),
        (2**27, 0, "recording asked for up to 96.0 MiB of the 128.0 MiB in PYGRAPH_MEMORY"),
        (
            2**26,
            2,
            "recording asked for up to 96.0 MiB of the 64.0 MiB in PYGRAPH_MEMORY; 2 recordings refused for lack of memory",
        ),
    ],
)
def test_the_cost_has_the_memory_that_recording_asked_for(
    tmp_path: Path, locations: Locations, limit: int, refused: int, said: str
) -> None:
    written = a_program()
    written.memory_limit = limit
    written.note_memory(96 * 2**20)
    written.note_memory(1)
    written.count(refused_for_memory=refused)
    made = read_back(written, tmp_path, locations)

    assert dict(headline(made))["cost"].endswith(f"; up to 3.0 MiB in a call; {said}")
    assert f"; {said}<" in report_html.page(made)
    memory = {"limit_bytes": limit, "peak_requested_bytes": 96 * 2**20, "refused_recordings": refused}
    assert written.summary()["memory"] == made.as_json()["memory"] == memory


def test_a_summary_without_memory_is_read(tmp_path: Path, locations: Locations) -> None:
    """One of an older version; and one with a setting beyond all numbers is written so that it can be read."""
    written = a_program()
    written.memory_limit = 10**24
    assert read_back(written, tmp_path, locations).summary.memory.limit_bytes == MAX_COUNT

    old = written.summary()
    del old["memory"]
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old))
    made = report(read_summary(file), locations)

    assert made.summary.memory.peak_requested_bytes == 0
    assert "recording asked" not in report_text(made)


def test_a_graph_whose_kernels_are_not_known_is_named_beside_the_coverage(
    tmp_path: Path, locations: Locations
) -> None:
    made = read_back(a_program(launches=None), tmp_path, locations)
    expected = "45 of 45 kernels a step in 3 graphs; 1 graph has kernels that are not counted"
    assert dict(headline(made))["coverage"] == expected


def test_kernels_of_a_graph_that_is_not_recorded_count_as_outside(
    tmp_path: Path, locations: Locations
) -> None:
    written = Written()
    for digit, decision in (("a", FASTER), ("b", only_kernels(Reason(ReasonCode.TOO_FEW_CALLS)))):
        written.note_graph(digit * 64, launches=7, launches_between=1, module="L['self']")
        written.record_deployment(graph(digit), HERE, decision, Source.RULE)
    made = read_back(written, tmp_path, locations)

    assert made.as_json()["coverage"] == {
        "kernels_in_graphs": 0,
        "graphs": 0,
        "graphs_not_recorded": 1,
        "kernels_outside": 16,
        "graphs_not_counted": 0,
    }
    coverage = dict(headline(made))["coverage"]
    assert coverage == "0 of 16 kernels a step in 0 graphs; 1 more graph not recorded yet"
    assert {row.module for row in made.rows} == {"the whole module"}


def test_nothing_is_said_of_a_program_of_which_nothing_is_known(tmp_path: Path, locations: Locations) -> None:
    written = Written()
    assert dict(headline(read_back(written, tmp_path, locations)))["coverage"].startswith("no graphs")

    written.record_deployment(graph("a"), HERE, only_kernels(Reason(ReasonCode.NO_DEVICE)), Source.RULE)
    made = read_back(written, tmp_path, locations)

    assert [text for name, text in headline(made) if name != "run"] == [
        "none of 1 compiled graph in a GRAPH",
        "not known: no graph was measured",
        "0.0 ms once",
    ]
    assert "<svg" not in report_html.page(made)


class Page(HTMLParser):
    """The tags of a page; fails where one is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.names.update(name for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.names.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_text_says_which_run_it_is_of(
    kept: Path, locations: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed leaves no summary, and the newest is then that of an earlier run."""
    os.utime(kept, (1e9, 1e9))
    assert pygraphd("report") == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("run "))
    summary = read_summary(kept)
    assert summary.program
    named = re.escape(f"{summary.program}, pid {os.getpid()}, ended ")
    # The user's own time, so the hour depends on where that is.
    assert re.search(rf"{named}2001-09-0[89] \d\d:\d\d:40 ", line)
    made = dataclasses.replace(report(summary, locations), written_at=1e300)
    assert dict(headline(made))["run"].endswith(", ended at a time that is not known")


def test_the_page_is_whole_and_refers_to_nothing_outside(tmp_path: Path, locations: Locations) -> None:
    text = report_html.page(read_back(a_program(), tmp_path, locations))

    page = Page()
    page.feed(text)

    assert page.open == []
    assert page.seen.count("svg") == 2
    assert not {"script", "link", "img", "iframe", "object", "use", "image"} & set(page.seen)
    assert not {"src", "href", "xlink:href", "srcset", "data", "action", "style"} & page.names
    assert not re.search(r"url\(|@import|https?:|//", re.sub(r"<title>.*?</title>|/x/train\.py", "", text))
    assert "&lt;script&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    used, defined = set(re.findall(r"var\((--\w+)\)", text)), set(re.findall(r"(--\w+):", text))
    assert used <= defined


def test_a_word_names_a_file_a_process_or_the_last_summary(tmp_path: Path, locations: Locations) -> None:
    variables = {"PYGRAPHD_HOME": str(tmp_path / "home")}
    asked = summary_files.variable_for("/jobs/train.py", locations, variables)
    kept = Path(asked["PYGRAPH_SUMMARY"])
    assert kept.parent == summary_files.folder(locations)
    assert re.fullmatch(rf"{os.getpid()}\.[0-9a-f]{{8}}\.train\.py\.json", kept.name)
    for variable in ("PYGRAPH_SUMMARY", "PYGRAPH_READONLY"):
        assert summary_files.variable_for("train.py", locations, {variable: "1"}) == {}
    for off in ("0", "", "off"):
        assert summary_files.variable_for("/jobs/train.py", locations, {"PYGRAPH_READONLY": off}) == asked
    with pytest.raises(UsageError, match="no summary yet"):
        summary_files.find("last", locations, variables)

    kept.write_text("{}")
    rank = kept.with_name(f"{kept.name}.1")
    rank.write_text("{}")
    os.utime(kept, ns=(1, 1))
    os.mkfifo(kept.with_name("9.pipe.py.json"))

    assert summary_files.find("last", locations, variables) == rank
    assert summary_files.find(str(kept), locations, variables) == kept
    assert summary_files.find(str(os.getpid()), locations, variables).name.startswith(f"{os.getpid()}.")
    assert summary_files.of_program("moved/train.py", locations, variables) == rank
    other = Path(summary_files.variable_for("/elsewhere/train.py", locations, variables)["PYGRAPH_SUMMARY"])
    other.write_text("{}")
    assert summary_files.of_program("/elsewhere/train.py", locations, variables) == other
    assert summary_files.of_program("/jobs/train.py", locations, variables) == rank
    assert summary_files.of_program("other.py", locations, variables) is None
    with pytest.raises(UsageError, match="no process with this pid"):
        summary_files.find("31", locations, variables)


def test_kept_summaries_are_bounded_and_never_keep_a_script_from_running(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_files, "MAX_SUMMARIES", 2)
    summary_files.variable_for("a.py", locations, {})
    for number in range(4):
        (summary_files.folder(locations) / f"{number}.a.py.json").write_text("")
    summary_files.variable_for("a.py", locations, {})
    assert len(list(summary_files.folder(locations).iterdir())) == 1

    summary_files.folder(locations).chmod(0o777)
    assert summary_files.variable_for("a.py", locations, {}) == {}


@pytest.fixture
def kept(tmp_path: Path, locations: Locations, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the summary of a program, which `last` names, in a folder in which the commands run."""
    monkeypatch.setenv("PYGRAPHD_HOME", str(locations.cache))
    monkeypatch.chdir(tmp_path)
    file = Path(summary_files.variable_for("train.py", locations, {})["PYGRAPH_SUMMARY"])
    file.write_text(json.dumps(a_program().summary()))
    return file


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([], "pygraphd doctor last"),
        (["last"], "pygraphd doctor last"),
        (["PID"], "pygraphd doctor PID"),
        (["a copy.json"], "pygraphd doctor 'a copy.json'"),
    ],
)
def test_the_doctor_is_named_with_the_same_argument(
    kept: Path, capsys: pytest.CaptureFixture[str], target: list[str], words: str
) -> None:
    shutil.copy(kept, "a copy.json")
    pid = str(os.getpid())
    assert pygraphd("report", *(word.replace("PID", pid) for word in target)) == 0
    assert f"To have more kernels in graphs: {words.replace('PID', pid)}\n" in capsys.readouterr().out


def test_only_a_page_is_replaced_by_a_page(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = kept.read_bytes()

    assert pygraphd("report", str(kept), "--html", str(kept)) == 2
    assert "is no page" in capsys.readouterr().err
    assert kept.read_bytes() == before
    Path("page.html").touch()
    for _ in range(2):
        assert pygraphd("report", str(kept), "--html", "page.html") == 0


def test_a_page_that_was_written_is_told_and_names_its_summary(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pygraphd("report", "--html", "out.html") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("coverage ")
    assert captured.err == "wrote out.html\n"
    assert f"pygraphd doctor {kept}<" in Path("out.html").read_text(encoding="utf-8")
    assert pygraphd("report", "--html", "out.html", "--json") == 0
    json.loads(capsys.readouterr().out)
    assert pygraphd("report", "--html", "none/out.html") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "",
        "pygraphd: none/out.html: cannot be written, as there is no folder none\n",
    )


def test_a_page_for_standard_output_is_alone_there(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads(kept.read_text())
    summary["program"]["name"] = "träning\u00a0.py"
    kept.write_text(json.dumps(summary))
    assert pygraphd("report", "--html", "out.html") == 0
    capsys.readouterr()

    assert pygraphd("report", "--html", "-") == 0
    captured = capsys.readouterr()

    assert captured.err == ""
    assert captured.out.isascii()
    assert html.unescape(captured.out) == html.unescape(Path("out.html").read_text(encoding="utf-8"))
    assert not Path("-").exists()
    assert pygraphd("report", "--html", "-", "--json") == 2
    assert "give --html a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "doctor"])
@pytest.mark.usefixtures("kept")
def test_what_is_no_file_is_named_also_where_a_graph_might_be_called_so(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in ("fifo", "f", "31"):
        os.mkfifo(name)
        assert pygraphd(command, name) == 2
        said = f"pygraphd: {name}: is a pipe, not a summary; {HOW}\n"
        assert capsys.readouterr().err == said
    os.mkfifo(str(os.getpid()))
    assert pygraphd("report", str(os.getpid())) == 0


@pytest.mark.timeout(30)  # it would be waited for
def test_a_page_is_not_written_to_a_pipe_that_nobody_reads(
    tmp_path: Path, locations: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_html, "WAIT_S", 0.1)
    pipe, summary = tmp_path / "pipe", tmp_path / "summary.json"
    os.mkfifo(pipe)
    summary.write_text(json.dumps(a_program().summary()))

    assert pygraphd("report", str(summary), "--html", str(pipe)) == 1
    assert capsys.readouterr().err == f"pygraphd: {pipe}: cannot be written: nobody reads it\n"

    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        report_html.write(pipe, "a page")
        assert os.read(reader, 100) == b"a page"
        with pytest.raises(CommandError, match="its reader took more than"):
            report_html.write(pipe, "x" * 2**20)
    finally:
        os.close(reader)


def test_a_page_replaces_a_file_at_once_and_follows_links(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("<!DOCTYPE html>before")
    page.chmod(0o640)
    link.symlink_to(page)

    report_html.write(link, "after\ud800")

    assert (page.read_text(), link.is_symlink(), page.stat().st_mode & 0o777) == ("after?", True, 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("/dev/full", 1, "cannot be written: No space left on device"),
        ("/", 2, "is a folder; give the name of a file in it"),
        ("/nowhere/page.html", 2, "cannot be written, as there is no folder /nowhere"),
        ("/dev/null/page.html", 2, "cannot be written, as there is no folder /dev/null"),
    ],
)
def test_a_page_that_cannot_be_written_is_one_line(
    tmp_path: Path,
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    target: str,
    code: int,
    said: str,
) -> None:
    report_html.write(Path("/dev/null"), "a page")
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(a_program().summary()))

    assert pygraphd("report", str(summary), "--html", target) == code
    assert capsys.readouterr().err == f"pygraphd: {target}: {said}\n"


def test_a_cost_that_no_number_of_steps_pays_back(tmp_path: Path, locations: Locations) -> None:
    """The quotient of a long time and a tiny gain is infinite."""
    made = Written()
    made.record_deployment(graph("a"), HERE, FASTER, Source.MEASURED, measured=both(1e-300, 1e-310))
    written = made.summary()
    written["measuring_ms"] = 1e12
    for figure in written["facts"]["a" * 64]["figures"]:
        figure["host_us"] = figure["span_us"] = 2e-300 if figure["deployment"] == "KERNELS" else 1e-300
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(written))

    found = report(read_summary(file), locations)
    assert found.gain_ms > 0
    assert found.paid_back_after is None
    assert "paid back" not in report_text(found)
