"""What processes on a GPU tell each other through a real daemon: what one has measured the next knows, others wait for, and elsewhere is checked."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.daemon_home import Home
from tests.support.programs import daemon_training
from tests.support.rank_processes import ours, started, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROGRAM = Path(daemon_training.__file__)
WORLD = 3
GRAPHS = 2
"""The program's: a forward and its backward."""


@dataclass(frozen=True)
class Program:
    """What is run here; `inductor` has its compiled code, so that processes come to what they measure at once."""

    inductor: Path
    losses: list[float]
    """Of each time that it trains, as they are without compiling."""

    def train(self, home: Home, name: str, world: int = 1, **variables: str) -> list[dict[str, Any]]:
        """Run it in processes beside a home's daemon until all is decided, and right in each step; return their summaries."""
        folder = home.path.with_name(name)
        beside = {"PYGRAPHD_HOME": str(home.path), "TORCHINDUCTOR_CACHE_DIR": str(self.inductor)}
        started(PROGRAM, folder, world, lambda number: {**ours(folder, number), **beside, **variables})
        said = [summary(folder, number) for number in range(world)]
        for number, each in enumerate(said):
            losses = torch.tensor(json.loads((folder / f"losses.{number}").read_text()))
            expected = torch.tensor(self.losses).expand_as(losses)
            torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
            assert each["failures"] == {}
            assert each["daemon"]["version"] is not None
            assert len(deployments(each)) == GRAPHS
            assert all(decision["final"] for decision in each["decisions"])
            expect(each, graphs=GRAPHS, looked_up=GRAPHS, spooled=0)
        return said


def expect(said: dict[str, Any], **counts: int) -> None:
    """Assert some counters of a process."""
    assert {name: said[name] for name in counts} == counts


def deployments(said: dict[str, Any]) -> dict[str, str]:
    """Return how each graph ran, which the other counter of that has to bear out."""
    found = {each["graph"]: each["deployment"] for each in said["decisions"]}
    ran = list(found.values())
    assert {name: ran.count(name) for name in said["deployed"]} == said["deployed"]
    return found


def sources(said: dict[str, Any]) -> set[str]:
    return {each["source"] for each in said["decisions"]}


def entries(home: Home) -> int:
    status, stats = home.ask("GET", "/v1/stats")
    assert status == 200
    count: int = stats["entries"]
    return count


@contextlib.contextmanager
def with_daemon(path: Path, **variables: str) -> Iterator[Home]:
    """Have a daemon in an empty home, with more variables in its environment, and none when this ends."""
    path.mkdir(mode=0o700)
    opened = Home(path, variables)
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with with_daemon(tmp_path / "home") as opened:
        yield opened


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Compile the program, in a home of its own without a daemon."""
    folder = tmp_path_factory.mktemp("compiled") / "program"
    started(PROGRAM, folder, 1, lambda number: ours(folder, number))
    training = daemon_training.Training()
    return Program(folder / "inductor", training.again(training.module))


@dataclass(frozen=True)
class Exported:
    """What was measured in a home that is gone."""

    file: Path
    deployments: dict[str, str]


@pytest.fixture(scope="module")
def exported(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("elsewhere")
    file = folder / "known.jsonl"
    with with_daemon(folder / "home") as elsewhere:
        (said,) = program.train(elsewhere, "measuring")
        done = elsewhere.pygraphd("cache", "export", str(file))
    assert done.returncode == 0, done.stderr
    expect(said, measured=GRAPHS, recorded=GRAPHS)
    return Exported(file, deployments(said))


@pytest.fixture
def importer(home: Home, exported: Exported) -> Home:
    """Return a home that knows of the program's graphs what was found out in another, and nothing else."""
    done = home.pygraphd("cache", "import", str(exported.file), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["added"] == GRAPHS
    return home


def test_a_second_process_measures_nothing_and_runs_as_the_first(home: Home, program: Program) -> None:
    (first,) = program.train(home, "first")
    (second,) = program.train(home, "second")

    expect(first, hits=0, misses=GRAPHS, measured=GRAPHS, recorded=GRAPHS)
    expect(second, hits=GRAPHS, misses=0, measured=0, recorded=0)
    for each in (first, second):
        expect(each, waited=0, adopted=0, validated=0, disputed=0)
    assert second["measuring_ms"] == 0
    assert (sources(first), sources(second)) == ({"measured"}, {"cache"})
    assert deployments(second) == deployments(first)
    assert second["captured"] >= second["deployed"]["GRAPH"]
    assert entries(home) == GRAPHS


def test_of_processes_that_begin_at_once_one_measures_each_graph(home: Home, program: Program) -> None:
    """All have asked before anybody can be done: the others wait, and go on with the answer in the middle of their training."""
    said = program.train(home, "together", WORLD)

    assert sum(each["measured"] for each in said) == GRAPHS
    for each in said:
        expect(each, recorded=each["measured"], adopted=GRAPHS - each["measured"])
        assert sources(each) <= {"measured", "cache"}
    for each in said:
        expect(each, hits=0, misses=GRAPHS, disputed=0)
        assert deployments(each) == deployments(said[0])
    assert entries(home) == GRAPHS


def sources_with(disputed: int) -> set[str]:
    """Return where the decisions of a program come from if this number of them did not hold."""
    has_any = {"cache": disputed < GRAPHS, "measured": disputed > 0}
    return {source for source, is_there in has_any.items() if is_there}


def test_what_was_imported_is_used_at_once_and_checked(
    importer: Home, program: Program, exported: Exported
) -> None:
    """Whether it holds is for the GPU and its other users to say, of forward and backward each by itself."""
    (said,) = program.train(importer, "checking")

    expect(said, hits=GRAPHS, misses=0, validated=GRAPHS, adopted=0)
    disputed = said["disputed"]
    assert 0 <= disputed <= GRAPHS
    expect(said, measured=disputed, recorded=disputed)
    assert sources(said) == sources_with(disputed)
    assert disputed or deployments(said) == exported.deployments
    assert entries(importer) == GRAPHS


def test_what_was_imported_is_not_checked_where_all_is_trusted(
    importer: Home, program: Program, exported: Exported
) -> None:
    (said,) = program.train(importer, "trusting", PYGRAPH_TRUST="all")

    expect(said, hits=GRAPHS, misses=0, validated=0, disputed=0, measured=0, recorded=0, waited=0)
    assert sources(said) == {"cache"}
    assert deployments(said) == exported.deployments


def test_what_was_imported_is_measured_anew_where_only_our_own_is_trusted(
    importer: Home, program: Program
) -> None:
    """What was found out here has then taken its place, and needs no check."""
    (said,) = program.train(importer, "distrusting", PYGRAPH_TRUST="local")
    (again,) = program.train(importer, "again")

    expect(said, hits=0, misses=GRAPHS, measured=GRAPHS, recorded=GRAPHS)
    expect(said, validated=0, disputed=0, waited=0, adopted=0)
    assert sources(said) == {"measured"}
    assert all(each["because"] for each in said["decisions"])
    expect(again, hits=GRAPHS, misses=0, validated=0, measured=0)
    assert deployments(again) == deployments(said)
    assert entries(importer) == GRAPHS


def test_what_was_shipped_is_used_at_once_and_checked(
    tmp_path: Path, program: Program, exported: Exported
) -> None:
    """Nothing of it goes into the cache."""
    shipped = tmp_path / "exports"
    shipped.mkdir(mode=0o700)
    shutil.copy(exported.file, shipped / "gpu.jsonl")
    with with_daemon(tmp_path / "home", PYGRAPHD_SHIPPED=str(shipped)) as home:
        (said,) = program.train(home, "shipped", PYGRAPHD_SHIPPED=str(shipped))
        found = entries(home)

    disputed = said["disputed"]
    expect(said, hits=GRAPHS, misses=0, validated=GRAPHS, measured=disputed, recorded=disputed)
    assert sources(said) == sources_with(disputed)
    assert disputed or deployments(said) == exported.deployments
    assert found == disputed
