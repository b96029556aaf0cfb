"""The parts of docs/performance.md and README.md on programs of popular libraries, from `clients-GPU.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.lab.clients.catalogue import TWO_GPUS
from tools.lab.stored import Result, code, gpu_of, markdown_table, milliseconds, read_results

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHOWN = ("eager", "default", "reduce-overhead", "pygraph-default", "pygraph-cold")
_NAMES = {
    "reduce-overhead": 'plain `mode="reduce-overhead"`',
    "pygraph-default": "PyGraph in default mode",
    "pygraph-cold": 'PyGraph with `mode="reduce-overhead"`',
}
_OF_TWO = {each.name for each in TWO_GPUS}
_LIBRARIES, _TWO = "Programs on popular libraries", "Programs on two GPUs"
_MAX_REASON = 160


@dataclass(frozen=True, slots=True)
class Programs:
    """The processes of each program, by program and variant."""

    processes: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Programs:
        """Return the processes that were run; one that was skipped was not."""
        found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for each in records:
            if not each.get("skipped"):
                found.setdefault((each["client"], each["variant"]), []).append(each)
        return cls(found)

    @property
    def names(self) -> list[str]:
        """The programs that run with plain `torch.compile`, as all others are held against that."""
        names = dict.fromkeys(name for name, _ in self.processes)
        return [
            name for name in names if (name, "default") in self.processes and not self.raised(name, "default")
        ]

    def raised(self, name: str, variant: str) -> str:
        """Return the line by which a process failed; empty if none did."""
        return next(
            (str(each["raised"]) for each in self.processes.get((name, variant), ()) if each["raised"]), ""
        )

    def differs(self, name: str, variant: str) -> bool:
        """Whether a process had other results than it may have."""
        return any(each.get("agrees") is False for each in self.processes.get((name, variant), ()))

    def step_ms(self, name: str, variant: str) -> float | None:
        """Return the median over processes of the time of a step; of two, the shorter one, as a process may be disturbed."""
        times = [each["step_ms"] for each in self.processes.get((name, variant), ()) if each.get("step_ms")]
        return statistics.median_low(times) if times else None


def client_sections(folder: Path) -> Iterator[str]:
    """Yield a section for the programs of one GPU in each stored result, and one for those of two."""
    for result in read_results(folder, "clients"):
        for title, programs in _parts(result):
            yield _section(result, title, programs)


def _parts(result: Result) -> Iterator[tuple[str, Programs]]:
    records = result.content["records"]
    for title, of_two in ((_LIBRARIES, False), (_TWO, True)):
        programs = Programs.of([each for each in records if (each["client"] in _OF_TWO) == of_two])
        if programs.processes:
            yield title, programs


def _section(result: Result, title: str, programs: Programs) -> str:
    told = (
        "Time of a step in ms; of two processes, the shorter one. "
        "Behind it, that of `default` over it: above 1, it is faster."
    )
    parts = [
        f"## {title}, on {gpu_of(result)}",
        result.where([]),
        case(result, title, programs),
        told,
        _table(programs),
        *_raised(programs),
    ]
    return "\n\n".join(parts)


def readme_clients(folder: Path) -> str:
    """Return what README.md says of these programs; empty without a stored result."""
    # The first alone: old results come last.
    for result in read_results(folder, "clients")[:1]:
        return "\n\n".join(case(result, title, programs) for title, programs in _parts(result))
    return ""


def case(result: Result, title: str, programs: Programs) -> str:
    """Return in how many programs each variant raised or had other results, and the gain where it ran."""
    told = f"{len(programs.names)} {title[0].lower()}{title[1:]}"
    variants = [each for each in _NAMES if any(each == known for _, known in programs.processes)]
    raised = [f"{_NAMES[each]} {_raised_in(programs, each)}" for each in variants]
    sentences = [f"Of {told}, {', '.join(raised)}."] if raised else []
    # One sentence rather than a zero for each variant.
    if variants and not any(programs.raised(name, each) for name in programs.names for each in variants):
        sentences = [f"None of the {told} raised an error, plainly or with PyGraph."]
    for variant in _NAMES:
        wrong = [name for name in programs.names if programs.differs(name, variant)]
        if wrong:
            sentences.append(
                f"The results with {_NAMES[variant]} differ in {len(wrong)}: {', '.join(wrong)}."
            )
    if gains := [gain for name in programs.names if (gain := _gain(programs, name, "pygraph-default"))]:
        mean = statistics.geometric_mean(gains)
        sentences.append(
            f"Where both ran, a step of {code('default')} took {mean:.2f} times as long as with PyGraph in default mode"
            f" (geometric mean of {len(gains)}, {gpu_of(result)})."
        )
    return " ".join(sentences)


def _raised_in(programs: Programs, variant: str) -> str:
    count = sum(bool(programs.raised(name, variant)) for name in programs.names)
    return f"raised in {count or 'none'}"


def _gain(programs: Programs, name: str, variant: str) -> float | None:
    plain, own = (programs.step_ms(name, each) for each in ("default", variant))
    if plain is None or own is None or programs.raised(name, variant):
        return None
    return plain / own


def _table(programs: Programs) -> str:
    shown = [each for each in _SHOWN if any(variant == each for _, variant in programs.processes)]
    lines = [[name, *(_cell(programs, name, variant) for variant in shown)] for name in programs.names]
    return markdown_table(["program", *map(code, shown)], lines)


def _cell(programs: Programs, name: str, variant: str) -> str:
    if programs.raised(name, variant):
        return "**raises**"
    step_ms = programs.step_ms(name, variant)
    if step_ms is None:
        return ""
    gain = _gain(programs, name, variant)
    ratio = f" ({gain:.2f})" if gain and variant != "default" else ""
    return f"{milliseconds(step_ms)}{ratio}{', **other results**' if programs.differs(name, variant) else ''}"


def _raised(programs: Programs) -> Iterator[str]:
    """Yield the table of what was raised, and of programs that do not run with plain `torch.compile`."""
    names = dict.fromkeys(name for name, _ in programs.processes)
    lines = [
        [name, code(variant), _line(programs.raised(name, variant))]
        for name in names
        for variant in _SHOWN
        if programs.raised(name, variant)
    ]
    if lines:
        yield markdown_table(["program", "variant", "raised"], lines)


def _line(text: str) -> str:
    # A bar would end the cell of the table, and a backtick the code within it.
    line = " ".join(text.replace("|", "/").replace("`", "'").split())
    return code(line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]} ...")
