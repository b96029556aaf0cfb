"""The parts of docs/performance.md and README.md on the public suites, from `suite-NAME-GPU.json`."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.records import records_of
from benchmarks.suites.catalogue import SUITES
from benchmarks.suites.tables import PAPER, STAND_INS
from benchmarks.workloads import Mode
from tools.lab.stored import Result, code, gpu_of, markdown_table, milliseconds, process_counts, read_results
from tools.lab.suites.results import (
    AGAIN,
    BY_HAND,
    DEFAULT,
    HEAD,
    KINDS,
    REDUCE_OVERHEAD,
    Results,
    geometric_mean,
    noise_text,
    noises,
    passed,
    remarks,
    rows,
)
from tools.lab.suites.summary import LINES_HEAD, line_rows
from tools.lab.suites.targets import lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.records import Record

_OURS = "pygraph-default"
_TITLES = {"huggingface": "HuggingFace", "timm": "TIMM", "torchbench": "TorchBench"}
_REASON = re.compile(r"\d+ x |(launched|ran as KERNELS): ")
"""How a remark of PyGraph's summary begins that says why graphs run as they do. `launched` was written by earlier versions."""
_OF_OLD = r"\*"
"""The mark of a suite in README.md whose figures are of an earlier version."""
_MAX_REASON = 160
"""Characters of a reason that a page shows."""


def stored_suites(folder: Path) -> list[Result]:
    """Return the stored results of all suites, those of the newest version first."""
    found = [each for suite in SUITES for each in read_results(folder, f"suite-{suite}")]
    return sorted(found, key=lambda each: bool(each.old))


def suite_sections(folder: Path) -> Iterator[str]:
    """Yield a section for each stored result, and one for the workloads of a published table."""
    stored = stored_suites(folder)
    yield from map(_section, stored)
    yield _paper(stored)


def readme_suites(folder: Path) -> str:
    """Return a table with a line for each suite and mode, empty without any."""
    found = [
        [
            f"{_name(each)}, {mode}, {gpu_of(each)}{_OF_OLD if each.old else ''}",
            *(_mean(results, other, kind) for other in (DEFAULT, REDUCE_OVERHEAD) for kind in KINDS),
            f"{statistics.median(noise):.0%}" if (noise := noises(results).values()) else "",
        ]
        for each in stored_suites(folder)
        for mode in Mode
        if (results := _results(each, mode)).passing(_OURS)
    ]
    if not found:
        return ""
    head = [
        "suite",
        *(f"{code(other)}, {kind}" for other in (DEFAULT, REDUCE_OVERHEAD) for kind in KINDS),
        "noise",
    ]
    told = (
        "Public suites as in PyTorch's dashboard: time of plain `torch.compile` over PyGraph's in default mode with an empty cache. "
        "Geometric mean over the models that both run, whose number is in brackets; above 1, PyGraph is faster. "
        "Noise: how far two processes of `default` are apart, median over the models."
    )
    table = markdown_table(head, found)
    remark = f"\n\n{_OF_OLD} Measured with an earlier version of PyGraph." if _OF_OLD in table else ""
    return f"{told}\n\n{table}{remark}"


def _mean(results: Results, other: str, kind: str) -> str:
    ratios = results.ratios(kind, [other], _OURS, results.passing(other, _OURS))
    mean = geometric_mean(ratios.values())
    return "" if mean is None else f"{mean:.2f} ({len(ratios)})"


# --- one result ------------------------------------------------------------------------------------


def _section(result: Result) -> str:
    told = (
        "A model passes if it ran and its results were not wrong. The first table's means are over the models that all of its variants pass, "
        f"but {code(BY_HAND)}; `docs/benchmarks.md` defines each column. Ratios above 1: PyGraph is faster. Compile time is of processes that "
        "began with empty caches, beside others that compiled. A suite is measured in the order of `benchmarks/suites/tables.py`: small and "
        "middle models of all families first, as most of the time is compiling, and large ones when there is time for them."
    )
    parts = [
        f"## {_name(result)} on {gpu_of(result)}",
        result.where(process_counts(records_of(result.content))),
        told,
        *(part for mode in Mode for part in _mode(result, mode)),
        *_left_out(result),
    ]
    return "\n\n".join(parts)


def _mode(result: Result, mode: Mode) -> Iterator[str]:
    results = _results(result, mode)
    if not results.models:
        return
    yield f"### {_name(result)}, {mode}"
    noise = noise_text(results)
    yield (
        f"{len(results.runnable())} models run in eager mode, {len(results.common)} count in the means."
        + (f" {noise[0].upper()}{noise[1:]}." if noise else "")
    )
    yield markdown_table(HEAD, [(code(cells[0]), *cells[1:]) for cells in rows(results)])
    yield markdown_table(LINES_HEAD, [_bold(cells) for cells in line_rows(results, mode)])
    yield "Time of a step that is waited for, in ms; behind PyGraph's, the better of the plain variants over it:"
    yield _models(results)
    yield from _misses(results, mode)


def _bold(cells: Sequence[str]) -> list[str]:
    return [f"**{cell.lower()}**" if cell == "NO" else cell for cell in cells]


def _models(results: Results) -> str:
    shown = [each for each in results.variants if each != AGAIN]
    noise, common = noises(results), set(results.common)
    found = [
        [
            short(name),
            *(_cell(results, name, variant) for variant in shown),
            f"{noise[name]:.0%}" if name in noise else "?",
            "yes" if name in common else "no",
        ]
        for name in results.models
    ]
    return markdown_table(["model", *map(code, shown), "noise", "in the means"], found)


def _cell(results: Results, model: str, variant: str) -> str:
    records = results.models[model]
    record = records.get(variant)
    if record is None:
        return ""
    if record.step_ms is None:
        return "fails"
    text = milliseconds(record.step_ms.median) + ("" if passed(record) else ", **wrong**")
    plain = [ms for each in (DEFAULT, REDUCE_OVERHEAD) if (ms := _step_ms(records.get(each)))]
    if not variant.startswith("pygraph") or not plain:
        return text
    return f"{text} ({min(plain) / record.step_ms.median:.2f})"


def _step_ms(record: Record | None) -> float | None:
    return record.step_ms.median if record and record.step_ms and passed(record) else None


def _misses(results: Results, mode: Mode) -> Iterator[str]:
    """Yield a table with the profile of each model by which a line is missed."""
    missed = dict.fromkeys(
        (model, line.variant)
        for line in lines(results, mode)
        if line.figure is not None and not line.is_met
        for model in line.missing
    )
    profiles = [
        [short(model), code(variant), *_profile(results.models[model], variant)]
        for model, variant in sorted(missed)
    ]
    if profiles:
        yield "Where a line is missed, the profile of a step and PyGraph's summary say of each model that misses it:"
        head = ["model", "variant", "host ms", f"host ms of {code(REDUCE_OVERHEAD)}", "kernels in graphs", f"of {code(REDUCE_OVERHEAD)}", "graph launches", "deployed, and why"]  # fmt: skip
        yield markdown_table(head, profiles)


def _profile(records: Mapping[str, Record], variant: str) -> Iterator[str]:
    own, plain = records[variant], records.get(REDUCE_OVERHEAD)
    yield from (f"{each.host_ms.median:.3f}" if each and each.host_ms else "" for each in (own, plain))
    yield from (f"{each.coverage:.1%}" if each and each.coverage is not None else "" for each in (own, plain))
    yield "" if own.graph_launches is None else str(own.graph_launches)
    deployed = [f"{count} {name}" for name, count in (own.deployed or {}).items() if count]
    reasons = [each for each in own.note.split("; ") if _REASON.match(each)]
    yield _cut("; ".join([", ".join(deployed), *reasons])) if deployed or reasons else ""


def _left_out(result: Result) -> Iterator[str]:
    """Yield the table of what cannot be run, fails, is wrong or was not compared."""
    found = [
        [
            each.kind,
            short(each.model),
            str(mode),
            code(each.variant) if each.variant else "",
            _cut(each.reason),
        ]
        for mode in Mode
        # Models that are left out are added below, once for the file and not for each mode.
        for each in remarks(_results(result, mode), {})
    ]
    found += [
        ["left out", name, "", "", reason] for name, reason in _reasons(result.content["settings"]).items()
    ]
    if found:
        yield f"### {_name(result)}: models that fail or are left out"
        yield markdown_table(["", "model", "mode", "variant", "reason"], found)


def _reasons(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return why models are left out; a file made of several has a list of such mappings."""
    told = settings.get("left_out") or {}
    return {
        name: reason for each in (told if isinstance(told, list) else [told]) for name, reason in each.items()
    }


def _cut(reason: str) -> str:
    """Return a reason as a cell: one line, not too long, and without what Markdown takes for something else."""
    line = " ".join(reason.replace("|", "/").split())
    return code(
        line.replace("`", "'")
        if len(line) <= _MAX_REASON
        else f"{line[:_MAX_REASON].replace('`', chr(39))} ..."
    )


def _results(result: Result, mode: Mode) -> Results:
    return Results.of_suite(_records(result, mode))


def _records(result: Result, mode: Mode) -> list[Record]:
    return [each for each in records_of(result.content) if each.mode == mode]


def _name(result: Result) -> str:
    return _TITLES[str(result.name).split("-")[1]]


def short(workload: str) -> str:
    """Return a workload's name without its mode."""
    # Not at the end alone: behind the mode there may be a batch, as in `XLNetLMHeadModel-inference-b1`.
    return workload.replace("-inference", "").replace("-training", "")


# --- the published table ---------------------------------------------------------------------------


def _paper(stored: Sequence[Result]) -> str:
    """Return the section of the 25 workloads: which were measured, and what stands for those that cannot be built."""
    table = []
    for each in PAPER:
        stand_in = STAND_INS.get(each.model)
        names = (f"{each.model}-{each.mode}-b{each.batch}", f"{each.model}-{each.mode}")
        found = [
            f"{mean:.2f}, {gpu_of(result)}"
            for result in stored
            if result.name.startswith(f"suite-{each.suite}")
            for name in names
            if (mean := _ratio(Results.of(_records(result, each.mode)), name, each.batch))
        ]
        table.append(
            [
                each.model,
                f"{_TITLES[each.suite]}, {each.mode}, {each.batch}",
                "; ".join(found),
                stand_in[0] if stand_in else "",
                stand_in[1] if stand_in else "",
            ]
        )
    told = (
        "The workloads of the table in a paper on CUDA graphs in PyTorch, with its batches: `--subset paper`. Some models need what cannot be "
        "downloaded, or are no more in their library. For these, workloads of `run` were written anew."
    )
    head = [
        "model",
        "suite, mode, batch",
        "`default` over PyGraph, default mode",
        "written anew as",
        "difference",
    ]
    return f"## The workloads of a published table\n\n{told}\n\n{markdown_table(head, table)}"


def _ratio(results: Results, name: str, batch: int) -> float | None:
    records = results.models.get(name)
    # A name without a batch stands for the suite's own, which need not be the table's.
    if records is None or any(each.batch != batch for each in records.values()):
        return None
    if not results.passes(name, DEFAULT, _OURS):
        return None
    return results.ratios("waited for", [DEFAULT], _OURS, [name]).get(name)
