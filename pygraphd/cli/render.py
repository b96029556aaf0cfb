"""Text and JSON of the commands' answers: a table on a terminal, aligned text elsewhere."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING

from pygraphd.cli.output import printable
from pygraphd.cli.wrapping import terminal_width, wrapped
from pygraphd.config import shown, variable
from pygraphd.schema.durations import human_duration
from pygraphd.schema.messages import Deployment
from pygraphd.schema.portable import HOST_PREFIXES
from pygraphd.schema.reasons import NOT_STATED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from pygraphd.cli.entries import CachedEntry, Page
    from pygraphd.cli.status import Process, Status
    from pygraphd.config import Survey
    from pygraphd.daemon.exchange import ImportAnswer
    from pygraphd.daemon.pruning import PruneAnswer
    from pygraphd.daemon.rederiving import RederiveAnswer
    from pygraphd.daemon.team.state import TeamState
    from pygraphd.schema.reasons import Reason

# Without an indent, with which Python's encoder is several times as slow.
_ENCODER = json.JSONEncoder(allow_nan=False)
_DIGITS = 12
_DEPLOYMENTS = tuple(each.value for each in Deployment)
MAX_GRAPHS_SHOWN = 3
NOT_VALID = "not valid"
"""Stands for the value of a setting that has none."""
SHIPPED_TEXT = "shipped"
"""Stands for the hits of an entry that came with the package, which `pygraphd stats` counts, and for who decided."""
_HEADER = (
    "ID",
    "GRAPH",
    "KIND",
    "PART",
    "OPS",
    "SIZES",
    "DEPLOYMENT",
    *(f"{name} us" for name in Deployment),
    "GPU",
    "AGE/HITS",
    "REASON",
)
_FIGURES_OF_ENTRY = ("ID", "KIND", "DEPLOYMENT", *(f"{name} us" for name in Deployment), " AGE", "   HITS")
_RIGHT = frozenset(
    {"PART", "OPS", *(f"{name} us" for name in Deployment), "SAMPLES", "COST us", "HOST us", "GPU us"}
    | {"SINCE START", "ALL TIME"}
    | {"KERNELS", "SHARE", "SAVES ms", "MiB", "DECIDED s"}
)
FIGURES = ("DEPLOYMENT", "SAMPLES", "COST us", "HOST us", "GPU us", "GPU BUSY")
"""The columns of `figure_cells`."""


def as_json(value: object) -> str:
    """Return `value` as indented JSON."""
    # Python writes NaN as a word that is no JSON, and that other readers refuse.
    return json.dumps(value, indent=2, allow_nan=False)


def entries_json(pages: Iterable[Page]) -> Iterator[str]:
    """Yield a listing as JSON page by page, with a line for each entry."""
    # By hand and page by page, since a listing may have a million entries.
    yield '{\n  "schema": 1,\n  "entries": ['
    before = ""
    for page in pages:
        if before:
            yield f"{before},"
        before = ",\n".join(_json_lines(page))
    if before:
        yield before
    yield "  ]\n}"


def _json_lines(page: Page) -> Iterator[str]:
    """Yield what `CachedEntry.as_json` returns of each entry: by column, which takes a quarter of the time of Python's encoder."""
    medians = (_json_cells(page.medians_us[name]) for name in _DEPLOYMENTS)
    cells = {name: _json_cells(values) for name, values in page.facts.items()} | {
        "text": _json_cells(page.texts()),
        "medians_us": [_json_medians(each) for each in zip(*medians, strict=True)],
        "provisional": _json_cells(page.provisional()),
        "shipped": [_ENCODER.encode(page.shipped)] * len(page),
    }
    line = "    {%s}" % ", ".join(f'"{name}": %s' for name in cells)  # noqa: UP031 - with braces of its own
    return map(line.__mod__, zip(*cells.values(), strict=True))


def _json_cells(values: Sequence[Any]) -> Sequence[str]:
    types = set(map(type, values))
    if types == {str}:
        texts = {each: _ENCODER.encode(each) for each in set(values)}
        return [texts[each] for each in values]
    if list in types:
        return list(map(_ENCODER.encode, values))
    # Numbers, true, false and null: none has a comma within.
    return _ENCODER.encode(list(values))[1:-1].split(", ")


def _json_medians(cells: Sequence[str]) -> str:
    measured = zip(_DEPLOYMENTS, cells, strict=True)
    return "{%s}" % ", ".join(f'"{name}": {cell}' for name, cell in measured if cell != "null")  # noqa: UP031


def entries_table(pages: Iterable[Page], now: float | None = None) -> Iterator[str]:
    """Yield a listing page by page, one line for each entry."""
    # One moment for all pages, so that ages can be compared.
    moment = time.time() if now is None else now
    widths = list(map(len, _HEADER))
    lines = [_HEADER]
    for page in pages:
        cells = _entry_cells(page, moment)
        # No narrower than the page before.
        widths = [max(width, *map(len, column)) for width, column in zip(widths, cells, strict=True)]
        lines.extend(zip(*cells, strict=True))
        yield _aligned(_HEADER, lines, widths)
        lines = []


def entries_in_lines(
    pages: Iterable[Iterable[CachedEntry]], width: int, now: float | None = None
) -> Iterator[str]:
    """Yield a listing page by page, two lines for each entry: its figures, and below them the graph and the reason, cut to a width."""
    moment = time.time() if now is None else now
    header = f"{_aligned_figures(*_FIGURES_OF_ENTRY)}\n"
    for page in pages:
        yield header + "\n".join(_two_lines(entry, width, moment) for entry in page)
        header = ""


def _two_lines(entry: CachedEntry, width: int, now: float) -> str:
    facts = entry.facts
    age = _age(facts["measured_at"], facts["created_at"], now)
    medians = (_microseconds(entry.medians_us.get(name)) for name in _DEPLOYMENTS)
    figures = (
        facts["id"][:_DIGITS],
        facts["kind"],
        _deployment(facts["deployment"], facts["final"]),
        *medians,
        age,
        hits_text(entry),
    )
    part = f"{facts['gpu']}, {facts['partition'] + 1}/{facts['partitions']}, {facts['operators']} ops{_origin(facts['host'])}"
    below = f"  {part}{sizes_text(facts['sizes'])}: {entry.text}"
    return f"{_aligned_figures(*figures)}\n{below if len(below) <= width else below[: width - 1] + '…'}"


def _aligned_figures(name: str, kind: str, deployment: str, *others: str) -> str:
    right = "".join(
        f"  {cell:>{len(header)}}" for cell, header in zip(others, _FIGURES_OF_ENTRY[3:], strict=True)
    )
    return f"{name:<{_DIGITS}}  {kind:<9}  {deployment:<10}{right}"


def status_text(status: Status) -> str:
    """Return the state of the daemon and its files."""
    facts = [
        ("pygraphd", _running(status)),
        ("socket", status.socket),
        ("database", status.database),
        ("entries", _entries(status)),
        ("spool", f"{status.spool_waiting} waiting, {status.spool_bad} unreadable"),
        ("log", status.log),
    ]
    if status.running:
        facts.extend((name, _setting(name, setting)) for name, setting in status.settings.items())
        if status.team is not None:
            facts.append(("team", team_text(status.team)))
        facts.append(("since start", ", ".join(f"{count} {name}" for name, count in status.counters.items())))
        facts.extend(("process", _process(each)) for each in status.processes)
        if status.processes_left_out:
            facts.append(("process", f"and {status.processes_left_out} more"))
    elif status.team_waiting or status.team_unpublished:
        facts.append(("team", team_waiting_text(status)))
    facts.extend(("problem", text) for text in status.problems)
    return pairs(facts)


def team_waiting_text(status: Status) -> str:
    """Return in one line what waits for a team while no daemon runs."""
    waiting = plural(status.team_waiting, "record waits", "records wait")
    too = ", and entries of the cache" if status.team_unpublished else ""
    return f"{waiting} to be published{too}; a daemon with a team does so when it runs"


def team_text(team: TeamState, now: float | None = None) -> str:
    """Return the state of the exchange with a team in one line."""
    moment = time.time() if now is None else now
    facts = [
        f"asked {human_duration(moment - team.answered_at)} ago" if team.answered_at else "not asked yet"
    ]
    if team.problem:
        since = human_duration(moment - (team.failing_since or moment))
        again = f"tried again in {human_duration(team.retry_s)}"
        facts = [f"not usable for {since}: {team.problem}", again]
    elif team.why_not_published:
        facts.append(f"nothing is published: {team.why_not_published}")
    facts.append(f"{plural(team.queued, 'record', 'records')} queued")
    if team.unpublished:
        facts.append(f"{plural(team.unpublished, 'entry', 'entries')} of the cache to be published after")
    if team.dropped:
        facts.append(f"{team.dropped} dropped")
    if team.queue_problem:
        facts.append(team.queue_problem)
    return "; ".join(facts)


def _entries(status: Status) -> str:
    own = "unknown" if status.entries is None else str(status.entries)
    return f"{own}, and {status.shipped} shipped" if status.shipped else own


def _process(process: Process) -> str:
    """Return a process in one line: program, graphs that it measures and waits for, and the time of its last request."""
    who = f"{process.pid} {process.program}" if process.pid else "in other pid namespaces"
    doing = [
        f"{what} {plural(count, 'graph', 'graphs')} ({_digits(graphs, count)})"
        for what, count, graphs in (
            ("measures", process.measuring, process.measures),
            ("waits for", process.waiting, process.waits_for),
        )
        if count
    ]
    return f"{who}: {', '.join(doing) or 'measures nothing'}; last asked {human_duration(process.idle_s)} ago"


def _digits(graphs: Sequence[str], count: int) -> str:
    shown = [graph[:_DIGITS] for graph in graphs[:MAX_GRAPHS_SHOWN]]
    return " ".join([*shown, *(["..."] if count > len(shown) else [])])


def prune_text(answer: PruneAnswer) -> str:
    """Return the outcome of a prune."""
    if answer.dry_run:
        return f"would delete {pruned_text(answer)}"
    return f"deleted {pruned_text(answer)}, {answer.freed_bytes / 1024:.0f} KiB freed"


def pruned_text(answer: PruneAnswer) -> str:
    """Return the number of entries and measurements of a prune."""
    return f"{plural(answer.entries, 'entry', 'entries')} and {plural(answer.measurements, 'measurement', 'measurements')}"


def rederive_text(answer: RederiveAnswer) -> str:
    """Return the outcome of a derivation: entries changed and kept, with reasons."""
    looked_at = plural(answer.entries, "entry", "entries")
    facts = [("looked at", f"{looked_at} with measurements, policy {answer.policy}")]
    facts.extend((f"{each.before} -> {each.after}", str(each.entries)) for each in answer.changed)
    facts.append(("renewed", f"{answer.renewed} with the same deployment"))
    facts.append(("unchanged", str(answer.unchanged)))
    facts.extend(("kept", f"{each.entries}: {each.reason}") for each in answer.kept)
    facts.append(("left alone", f"{answer.unmeasured} that rest on no measurement"))
    if answer.dry_run:
        facts.append(("dry run", "nothing was written"))
    return pairs(facts)


def export_text(entries: int, without: Mapping[str, int], spooled: int) -> str:
    """Return the number of entries written and left out, with reasons; `spooled` is the number of files in the spool."""
    written = f"wrote {plural(entries, 'entry', 'entries')}"
    left_out = "".join(f"; left out {count}, {reason}" for reason, count in sorted(without.items()))
    waiting = (
        f"; {plural(spooled, 'file waits', 'files wait')} in the spool: run `pygraphd start` first"
        if spooled
        else ""
    )
    return written + left_out + waiting


def import_text(answer: ImportAnswer) -> str:
    """Return the outcome of an import."""
    facts = [
        ("added", str(answer.added)),
        ("replaced", f"{answer.replaced} that were not final, or imported before"),
        ("kept", f"{answer.kept} that are known here"),
    ]
    if answer.left_out:
        facts.append(
            (
                "left out",
                f"{answer.left_out} that chose PyTorch's CUDA graph trees, which are no longer supported",
            )
        )
    if answer.dry_run:
        return pairs([*facts, ("dry run", "nothing was written")])
    return pairs(
        [*facts, ("derived anew", f"{answer.derived} that another version of the policy had decided")]
    )


def kind_text(facts: dict[str, object]) -> str:
    """Return kind, partition, operators and sizes of a graph."""
    partition = int(str(facts["partition"])) + 1
    part = f"{facts['kind']}, partition {partition} of {facts['partitions']}, {facts['operators']} operators"
    return f"{part}{sizes_text(facts['sizes'])}"


def sizes_text(sizes: object) -> str:
    """Return a suffix that names dynamic sizes; empty if there are none."""
    return f", at {_sizes(sizes)}" if sizes else ""


def _sizes(sizes: object) -> str:
    assert isinstance(sizes, list | tuple)
    return " x ".join(map(str, sizes))


def figure_cells(row: dict[str, object]) -> tuple[str, ...]:
    """Return the cells of one measurement in a table."""
    spreads = {"median_us": "mad_us", "host_us": "host_mad_us", "span_us": "span_mad_us"}
    times = (_with_spread(row[name], row[spread]) for name, spread in spreads.items())
    busy = row["busy"]
    assert isinstance(busy, float)
    return (str(row["deployment"]), str(row["samples"]), *times, f"{busy:.0%}")


def _with_spread(median_us: object, mad_us: object) -> str:
    return f"{median_us:.1f}" if mad_us is None else f"{median_us:.1f} ±{mad_us:.1f}"


def plural(count: int, one: str, many: str) -> str:
    """Return a count with its noun."""
    return f"{count} {one if count == 1 else many}"


def pairs(facts: Sequence[tuple[str, str]]) -> str:
    """Return names and values in two aligned columns."""
    width = max(len(name) for name, _value in facts)
    # Line breaks are not kept: behind one, a value could look like another name.
    return "\n".join(wrapped(f"{name:<{width}}  {printable(value)}", width + 2) for name, value in facts)


def fits(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a table has room for each cell in one line: in a terminal of that width, or in a file."""
    width = terminal_width()
    return width is None or sum(_widths(header, rows)) + 3 * len(header) + 1 <= width


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: drawn by rich on a terminal, aligned columns without colour codes elsewhere."""
    rows = [tuple(map(printable, row)) for row in rows]
    return _drawn_table(header, rows) if sys.stdout.isatty() else "\n".join(plain_lines(header, rows))


def plain_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table as they are in a file: the header, and one for each row."""
    return _aligned(header, (header, *rows), _widths(header, rows)).split("\n")


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


def _aligned(header: Sequence[str], lines: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    line_format = "  ".join(
        f"{{:{'>' if name in _RIGHT else '<'}{width}}}" for name, width in zip(header, widths, strict=True)
    )
    return "\n".join(line_format.format(*cells).rstrip() for cells in lines)


def _drawn_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # Imported here, since tables outside of a terminal do without rich.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD)
    for name in header:
        drawn.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for row in rows:
        # As text, not markup: a reason may hold square brackets.
        drawn.add_row(*map(Text, row))
    # No colours: `output` puts a question mark in the place of each escape code.
    console = Console(width=max(shutil.get_terminal_size().columns, 80), color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip("\n")


def _entry_cells(page: Page, now: float) -> tuple[Sequence[str], ...]:
    """Return the cells of a page, column by column, which takes a third of the time."""
    facts = page.facts
    parts = zip(facts["partition"], facts["partitions"], strict=True)
    deployed = zip(facts["deployment"], facts["final"], strict=True)
    places = zip(facts["gpu"], facts["host"], strict=True)
    times = zip(facts["measured_at"], facts["created_at"], strict=True)
    ages = (_age(measured, decided, now) for measured, decided in times)
    hits = itertools.repeat(SHIPPED_TEXT) if page.shipped else facts["hits"]
    return (
        [each[:_DIGITS] for each in facts["id"]],
        [each[:_DIGITS] for each in facts["graph"]],
        facts["kind"],
        [f"{partition + 1}/{partitions}" for partition, partitions in parts],
        list(map(str, facts["operators"])),
        [_sizes(each) or "-" for each in facts["sizes"]],
        [_deployment(name, final) for name, final in deployed],
        *(list(map(_microseconds, page.medians_us[name])) for name in _DEPLOYMENTS),
        [f"{gpu}{_origin(host)}" for gpu, host in places],
        [f"{age}/{count}" for age, count in zip(ages, hits)],  # noqa: B905 - `hits` may have no end
        page.texts(),
    )


def hits_text(entry: CachedEntry) -> str:
    """Return how often an entry was used."""
    return SHIPPED_TEXT if entry.shipped else str(entry.facts["hits"])


def _age(measured_at: float | None, created_at: float, now: float) -> str:
    """Return the age of an entry's measurements, or of its decision if it rests on none."""
    return human_duration(now - (created_at if measured_at is None else measured_at))


def _deployment(name: str, final: bool) -> str:
    return name if final else f"{name}?"


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def decided_text(entry: CachedEntry, now: float) -> str:
    """Return when and by whom an entry was decided."""
    if entry.shipped:
        return SHIPPED_TEXT
    return f"{human_duration(now - entry.facts['created_at'])} ago by uid {entry.facts['uid']}{_origin(entry.facts['host'])}"


def _origin(host: str) -> str:
    """Return what brought an entry, and from which host; empty if it was decided here."""
    return f", from {host}" if host.startswith(HOST_PREFIXES) else ""


def reason_against(deployment: str, reason: Reason, against: Reason) -> list[tuple[str, str]]:
    """Return a line with the reason against the other deployment; none if it equals the reason for this one, or is not stated."""
    if against in {reason, NOT_STATED}:
        return []
    return [(f"not {name}", str(against)) for name in Deployment if name != deployment]


def _running(status: Status) -> str:
    if not status.running:
        return "not running"
    return f"{status.version} running, pid {status.pid}, up {human_duration(status.uptime_s or 0)}"


def _setting(name: str, setting: dict[str, object]) -> str:
    return f"{shown(name, setting['value'])} ({setting['origin']})"


def config_text(found: Survey, file: Path | None) -> str:
    """Return the settings, each with its origin and the variable that sets it; one that is not valid is marked."""
    rows = [
        (
            name,
            NOT_VALID if "error" in setting else shown(name, setting["value"]),
            printable(setting["origin"]),
            variable(name),
        )
        for name, setting in found.settings().items()
    ]
    where = "no home, so no file" if file is None else f"{file}{_whether_there(file)}"
    return f"{table(('SETTING', 'VALUE', 'ORIGIN', 'VARIABLE'), rows)}\n\n{wrapped(f'file: {printable(where)}', 6)}"


def _whether_there(file: Path) -> str:
    try:
        # `exists` raises in a folder that may not be searched, as the HOME of another user that su has kept.
        return "" if file.exists() else " (does not exist)"
    except OSError:
        return " (cannot be read)"
