"""`python -m tools.lab report`: docs/performance.md and the figures of README.md and docs/team.md, made from benchmarks/results/.

A file is found by its name: `KIND-GPU.json`. One with a key `old` is shown after the others, with the reason that the key gives.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import region_table
from benchmarks.compare import BASELINES, Comparison, Kind, compare, variants_to_compare
from benchmarks.errors import BenchmarkError
from benchmarks.processes import ROOT
from benchmarks.variants import VARIANTS
from tools.lab.client_report import client_sections, readme_clients
from tools.lab.overhead import PARTS, overheads
from tools.lab.steps_report import is_complete, step_ms, steps_section
from tools.lab.stored import Result, code, gpu_of, markdown_table, process_counts, read_results
from tools.lab.suites.report import readme_suites, suite_sections

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_IN_README = (
    *("resnet50-inference", "bert-inference", "t5-generation", "dlrm-inference"),
    *("resnet50-training", "bert-training"),
)
_README_VARIANTS = {
    "pygraph-default": "PyGraph, default mode",
    "pygraph-cold": 'PyGraph, `mode="reduce-overhead"`',
}
_NONE = ""
_KINDS = " and ".join(Kind)


def write_report(root: Path = ROOT) -> list[str]:
    """Write all pages; return the names of those that have changed."""
    changed = []
    for name, text in pages(root).items():
        if (root / name).read_text() != text if (root / name).exists() else True:
            (root / name).write_text(text)
            changed.append(name)
    return changed


def pages(root: Path) -> dict[str, str]:
    """Return the pages as they are to be; raises BenchmarkError if one has no place for its figures."""
    results = root / "benchmarks/results"
    return {
        "docs/performance.md": performance(results),
        "README.md": _filled(root, "README.md", readme_figures(results)),
        "docs/team.md": _filled(root, "docs/team.md", team_figures(read_results(results, "team"))),
    }


def _filled(root: Path, name: str, figures: str) -> str:
    """Return a page with figures between its marks."""
    before, begin, rest = (root / name).read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise BenchmarkError(f"{name} has no lines {BEGIN} and {END} for its figures to stand between")
    return f"{before}{begin}\n{figures}\n{end}{after}"


# --- docs/performance.md ---------------------------------------------------------------------------

_INTRODUCTION = f"""# Performance

Made by `python -m tools.lab report` from the files in `benchmarks/results/`; do not edit it. `docs/benchmarks.md` says how to measure
and defines every term.

| variant | meaning |
| --- | --- |
{{variants}}

**Waited for:** the device is synchronised after each step, as in a program that reads its loss. **Back to back:** steps are issued without
waiting. A time is the median of the processes' median steps, in ms. In parentheses are its ratio to the better of
`{BASELINES[0]}` and `{BASELINES[1]}` (below 1, PyGraph is faster) and the noise. The noise is the spread among the processes of a variant:
of the two variants compared the larger one, and `?` with one process each. **Bold:** slower by more than the noise."""


def performance(folder: Path) -> str:
    """Return docs/performance.md."""
    shown = (*BASELINES, *(name for name, each in VARIANTS.items() if each.is_ours))
    variants = "\n".join(f"| `{name}` | {VARIANTS[name].summary} |" for name in shown)
    sections = [
        _INTRODUCTION.format(variants=variants),
        *(steps_section(each) for each in read_results(folder, "steps")),
        *suite_sections(folder),
        *client_sections(folder),
        *(_regions(each) for each in read_results(folder, "regions")),
        *(_overhead(each) for each in read_results(folder, "overhead")),
        *(_other_programs(each) for each in read_results(folder, "other-programs")),
        *(_daemon(each) for each in read_results(folder, "daemon")),
    ]
    return "\n\n".join(sections) + "\n"


def _regions(result: Result) -> str:
    records = result.content["records"]
    ways = region_table.ways(records)
    counts = region_table.process_counts(records)
    rows = [
        [
            each.workload,
            code(each.way),
            " + ".join(f"{us:.0f}" for us in each.host_us),
            _NONE if each.gpu_us is None else f"{each.gpu_us:.0f}",
            f"{each.reserved_mb:.0f}",
        ]
        for of_workload in ways.values()
        for each in of_workload.values()
    ]
    text = (
        "One call of each compiled graph, without Dynamo, autograd and the optimiser around it. The host's time is that of forward and "
        "backward, with nothing queued on the GPU; the GPU's is the span of all graphs, with a full queue."
    )
    head = ["workload", "run as", "host, us", "GPU, us", "reserved, MB"]
    return "\n\n".join(
        [
            f"## Compiled graphs on {gpu_of(result)}",
            result.where(counts),
            text,
            *result.content.get("notes", []),
            markdown_table(head, rows),
        ]
    )


def _overhead(result: Result) -> str:
    records = result.records
    found = {part.name: {each.workload: each for each in overheads(records, part)} for part in PARTS}
    workloads = dict.fromkeys(name for of_part in found.values() for name in of_part)
    rows = [
        [
            workload,
            *(
                f"{each.share:.2%}" if (each := of_part.get(workload)) else _NONE
                for of_part in found.values()
            ),
        ]
        for workload in workloads
    ]
    medians = [
        f"{statistics.median(each.share for each in of_part.values()):.2%}" if of_part else _NONE
        for of_part in found.values()
    ]
    text = "Time that PyGraph spends in a process, as a share of the time to compile with empty caches."
    table = markdown_table(["workload", *found], [*rows, ["median", *medians]])
    return "\n\n".join(
        [f"## Time to decide on {gpu_of(result)}", result.where(process_counts(records)), text, table]
    )


def _other_programs(result: Result) -> str:
    names = (*BASELINES, *(name for name, each in VARIANTS.items() if each.is_ours))
    records = result.content["records"]
    shown = [name for name in names if any(name in each for each in records)]
    rows = [
        [each["what"], *(str(each.get(name, _NONE)) for name in shown), each["setting"]] for each in records
    ]
    table = markdown_table(["program", *map(code, shown), "how"], rows)
    return "\n\n".join([f"## Other programs on {gpu_of(result)}", result.where([1]), table])


def _daemon(result: Result) -> str:
    """Return the sections of lookups, of commands, of records beside Redis, and of the soak; each kind of record is told by its fields."""
    records = result.content["records"]
    of_redis = [each for each in records if "server" in each]
    of_soak = [each for each in records if "bounds" in each]
    commands = [each for each in records if "command" in each]
    lookups = [each for each in records if "entries" in each and "command" not in each]
    parts = [_lookup(lookups)] if lookups else []
    parts += [_commands(commands)] if commands else []
    parts += [_redis(of_redis, result.content["environment"]["redis"])] if of_redis else []
    parts += map(_soak, of_soak)
    # The first one has the plain titles, to which other pages refer.
    on = f" on the host of an {result.name.partition('-')[2].upper()}" if "-" in result.name else ""
    return "\n\n".join([f"## The daemon{on}\n\n{result.where([])}", *parts])


def _lookup(records: Sequence[Mapping[str, Any]]) -> str:
    names = {
        "clients": "clients",
        "graphs": "graphs in a request",
        "entries": "entries in the cache",
        "requests": "requests",
        "asked_per_s": "requests a second wanted",
        "sent_per_s": "sent",
        "unanswered": "not answered",
        "p50_us": "median, us",
        "p99_us": "99th percentile, us",
        "cpu_us": "processor time each, us",
    }
    users = {
        "daemon": "cores for the daemon",
        "clients": "for clients",
        "others": "for other work",
        "awaited": "waits for a core",
    }
    rows = [
        [
            *(_plain(record.get(name)) for name in names),
            # The cores are counted only under the load of many clients.
            *(_plain(record.get("cores", {}).get(name)) for name in users),
        ]
        for record in records
    ]
    told = (
        "Beside a prune, but for the one client. Other work on the machine is in the last columns: what waits for a core is the thread that answers, as a share"
        " of the time."
    )
    return "\n\n".join(["### Lookups", told, markdown_table([*names.values(), *users.values()], rows)])


def _commands(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [code(each["command"]), f"{each['seconds']:g}", _plain(each.get("resident_mib"))] for each in records
    ]
    waits = [
        f"a {name} waited {told['p50_ms']:g} ms (median), {told['p99_ms']:g} (99th percentile) and {told['max_ms']:g} at most"
        for each in records
        for name, told in each.get("beside", {}).items()
    ]
    where = f"{records[0]['entries']:,} entries in the cache; the prune deletes a fifth. Beside it {'; '.join(waits)}."
    table = markdown_table(["command", "seconds", "memory, MiB"], rows)
    return "\n\n".join(["### Commands on a large cache", where, table])


def _redis(records: Sequence[Mapping[str, Any]], version: str) -> str:
    names = ("per_s", "p50_us", "p99_us", "cpu_us")
    head = ["request", "server", "a second", "median, us", "99th percentile, us", "server's processor time each, us"]  # fmt: skip
    rows = [[each["request"], each["server"], *(f"{each[name]:,.0f}" for name in names)] for each in records]
    where = f"{version}, {records[0]['clients']} clients."
    return "\n\n".join(["### Beside Redis", where, markdown_table(head, rows)])


def _soak(record: Mapping[str, Any]) -> str:
    order = ("first", "median", "last", "max")
    figures = [
        [code(name), *(f"{values[each]:,.0f}" for each in order)]
        for name, values in record["figures"].items()
    ]
    bounds = [
        [each["name"], f"{each['value']:.3g}", f"{each['most']:g}", "yes" if each["is_kept"] else "**no**"]
        for each in record["bounds"]
    ]
    sent = ", ".join(f"{count:,} {kind}" for kind, count in record["answered"].items())
    lost = ", ".join(f"{count:,} {reason}" for reason, count in record["unanswered"].items()) or "none"
    load = (
        f"{record['clients']} clients at a time, {record['clients_started']:,} one after the other, of which "
        f"{record['clients_killed']:,} were killed, for {record['seconds'] / 60:g} minutes. Answered: {sent}. Not answered: {lost}."
    )
    return "\n\n".join(
        [
            "### Under a long load",
            load,
            markdown_table(["each 10 seconds", *order], figures),
            markdown_table(["bound", "seen", "at most", "kept"], bounds),
        ]
    )


_GPUS, _GPUS_OF_A_HOST, _ASKED_AT_ONCE = 10_000, 8, 64


def team_figures(results: Sequence[Result]) -> str:
    """Return the tables of docs/team.md: what was measured, and what it means for 10,000 GPUs."""
    return "\n\n".join(part for each in results for part in (_team_measured(each), _team_expected(each)))


def _team_measured(result: Result) -> str:
    known = result.content["environment"]
    # Debian's servers have the version of the package behind that of PostgreSQL.
    server = f"PostgreSQL {known['postgres_server_version'].split()[0]} with its own settings"
    rows = [
        [
            name,
            f"{record[key + '_per_s']:,.0f}",
            f"{record[key + '_server_us']:.0f}",
            f"{record[key + '_connections']}",
        ]
        for record in result.content["records"]
        for name, key in (("records published", "publish"), ("graphs asked for", "ask"))
    ]
    [record] = result.content["records"]
    told = (
        f"Measured with {record['daemons']} daemons, each of which published {record['graphs']} records and then asked for as many of"
        f" another's. They and the server shared one machine: {server}, {known['cpu']}. A record takes"
        f" {record['bytes_of_a_record']:,} bytes with its indexes: one row of `decision`, one of `graph`, two of `measurement`."
    )
    header = [
        f"{record['daemons']} daemons at once",
        "a second",
        "processor time of the server for one, us",
        "connections at most",
    ]
    return f"{told}\n\n{markdown_table(header, rows)}"


def _team_expected(result: Result) -> str:
    [record] = result.content["records"]
    hosts, graphs = _GPUS // _GPUS_OF_A_HOST, record["graphs"]
    total = hosts * graphs
    # A daemon asks for at most so many graphs in one transaction: BATCH_GRAPHS in
    # pygraphd/daemon/team/wanted.py.
    transactions = hosts * -(-graphs // _ASKED_AT_ONCE)

    def row(what: str, count: int, key: str) -> list[str]:
        seconds = count * record[f"{key}_server_us"] / 1e6
        written = f"{count * record['bytes_of_a_record'] / 1e6:,.1f} MB" if key == "publish" else "none"
        return [what, f"{count:,}", f"{seconds:,.2f} s", written]

    rows = [
        row("one host measures a program", graphs, "publish"),
        row("all hosts start it at once, and know nothing", total, "ask"),
        row("all hosts have measured it, each by itself", total, "publish"),
    ]
    table = markdown_table(
        ["what happens", "records or graphs", "processor time of the server", "added to the disk"], rows
    )
    return (
        f"{_GPUS:,} GPUs in hosts of {_GPUS_OF_A_HOST} are {hosts:,} daemons. For a program of {graphs} graphs, where all ask at once, that is"
        f" {transactions:,} transactions. By the figures above, on one core:\n\n{table}"
    )


def _plain(value: float | None) -> str:
    return _NONE if value is None else f"{value:g}"


# --- README.md -------------------------------------------------------------------------------------


def readme_figures(folder: Path) -> str:
    """Return the figures of README.md: own workloads, the public suites, and programs on popular libraries."""
    parts = [readme_table(read_results(folder, "steps")), readme_suites(folder), readme_clients(folder)]
    return "\n\n".join(filter(None, parts))


def readme_table(results: Sequence[Result]) -> str:
    """Return the table of README.md, of the result with the most processes for each figure."""
    if not results:
        raise BenchmarkError("benchmarks/results/ has no steps-*.json")
    result = max(results, key=lambda each: (not each.old, min(process_counts(each.records))))
    records = result.records
    ours = [name for name in _README_VARIANTS if name in variants_to_compare(records)]
    comparisons = {name: {each.workload: each for each in compare(records, name)} for name in ours}
    shown = [name for name in _IN_README if all(name in of_variant for of_variant in comparisons.values())]
    rows = []
    for workload in shown:
        times = {name: comparisons[name][workload].waited_for for name in ours}
        plain = [step_ms(times[ours[0]], name) for name in BASELINES]
        rows.append([workload, *plain, *(step_ms(times[name], name) for name in ours)])
    head = ["ms a step", *map(code, BASELINES), *(_README_VARIANTS[name] for name in ours)]
    means = [
        f"{_README_VARIANTS[name]}: {_means_of(common)} over {len(common)} workloads"
        for name in ours
        if (common := [each for each in comparisons[name].values() if is_complete(each)])
    ]
    told = (
        f"{result.where(process_counts(records))}\n\nFirst runs with an empty cache; each step is waited for. Geometric means of the time over the "
        f"better of `{BASELINES[0]}` and `{BASELINES[1]}`, over the workloads that both run, {_KINDS}. {'. '.join(means)}."
        " All figures: `docs/performance.md`."
    )
    return f"{markdown_table(head, rows)}\n\n{told}"


def _means_of(common: Sequence[Comparison]) -> str:
    """Return the geometric means of the ratios of some workloads, in the order of `Kind`."""
    means = (
        statistics.geometric_mean([ratio for each in common if (ratio := each.times[kind].ratio)])
        for kind in Kind
    )
    return " and ".join(f"{mean:.2f}" for mean in means)
