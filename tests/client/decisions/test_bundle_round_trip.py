"""What one process measures comes to another one with another home: in PyTorch's artifacts, or by `PYGRAPH_BUNDLE`.

The clock stands in for the GPU's, as in `test_trust_daemon`.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.exporting import Export
from pygraphd.client.backend import torch_private
from pygraphd.client.decisions.decision_service import DISPUTED
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment
from tests.support.clock import Clock
from tests.support.compiled import ENOUGH, relocating, session, sources, trained
from tests.support.daemon_home import Home

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["relocating", "session"]  # fixtures

pytestmark = pytest.mark.torch

AS_KERNELS, CAPTURED = (["kernels"] * 2, ["kernels"]), (["relocated"] * 2, ["relocated"])
SLOW = {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0}
GRAPHS = 3


@pytest.fixture(params=["artifacts", "folder"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how decisions travel. Inductor's cache of this process is an empty folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    if request.param == "folder":
        monkeypatch.setenv(settings.BUNDLE, str(tmp_path / "shared"))
    return str(request.param)


def carry(told: Runtime, folder: Path) -> None:
    """Save the artifacts of a process, and load them where `folder` is Inductor's cache. PyGraph takes no part in loading."""
    with CacheArtifactManager.with_fresh_cache():
        remove = torch_private.add_to_artifacts(lambda add: add(told.cache.bundle.artifacts()))
        saved = torch.compiler.save_cache_artifacts()
        remove()
    assert saved is not None
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        loaded = torch.compiler.load_cache_artifacts(saved[0])
    assert loaded is not None
    assert len(loaded.autotune_artifacts) == GRAPHS


def at(home: Path) -> Runtime:
    return Runtime(locate({"PYGRAPHD_HOME": str(home)}))


def counts(told: Runtime, *names: str) -> tuple[Any, ...]:
    summary = told.report.summary()
    return tuple(summary[name] for name in names)


@pytest.fixture
def there(session: Runtime, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return another home, where what was decided has come."""
    told, steps = trained(session, ENOUGH)
    assert (steps[0], steps[-1]) == (AS_KERNELS, CAPTURED)
    told.close()
    if way == "artifacts":
        carry(told, tmp_path / "theirs")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    return tmp_path / "home"


def test_another_home_uses_it_at_once_and_validates_it(there: Path) -> None:
    told, steps = trained(at(there), ENOUGH)

    assert steps == [CAPTURED] * ENOUGH
    assert counts(told, "hits", "from_bundle", "measured", "validated", "disputed") == (3, 3, 0, 3, 0)
    assert sources(told) == {("GRAPH", "cache")}
    assert {each.partition(":")[0] for each in told.report.failures} <= {"daemon"}


def test_it_goes_on_to_a_third_home(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry(trained(at(there), 3)[0], tmp_path / "thirds")
    monkeypatch.delenv(settings.BUNDLE, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "thirds"))

    assert counts(trained(at(tmp_path / "third"), 3)[0], "hits", "from_bundle") == (GRAPHS, GRAPHS)


def test_what_does_not_hold_there_is_measured_anew_and_replaced(
    there: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "times_us", SLOW)

    told, steps = trained(at(there), 2 * ENOUGH)
    told.close()

    assert (steps[0], steps[-1]) == (CAPTURED, AS_KERNELS)
    assert told.report.fallbacks == {DISPUTED: GRAPHS}
    contents: list[Any] = list(told.cache.bundle.artifacts().values())
    assert [each["entry"]["record"]["decision"]["deployment"] for each in contents] == ["KERNELS"] * GRAPHS
    if way == "folder":
        files = [each for each in (there.parent / "shared").iterdir() if each.name != ".writing"]
        assert {
            json.loads(each.read_text())["entry"]["record"]["decision"]["deployment"] for each in files
        } == {"KERNELS"}


@pytest.mark.parametrize(("name", "value"), [(settings.TRUST, "local"), (settings.REFRESH, "1")])
def test_it_is_not_used_where_the_user_says_so(
    there: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)

    told, steps = trained(at(there), ENOUGH)

    assert (steps[0], steps[-1]) == (AS_KERNELS, CAPTURED)
    assert counts(told, "hits", "measured") == (0, GRAPHS)


@pytest.mark.daemon
@pytest.mark.parametrize("readonly", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["folder"], indirect=True)
def test_the_daemon_there_has_it_from_then_on(
    there: Path, readonly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.READONLY, str(int(readonly)))
    there.mkdir(mode=0o700)
    home = Home(there)
    try:
        home.start()
        first, _ = trained(at(there), 3)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(there / "empty"))
        monkeypatch.delenv(settings.BUNDLE, raising=False)
        second, _ = trained(at(there), 3)
        with Catalogue(home.locations.database) as catalogue:
            hosts = [each.origin.host for each in Export(catalogue)]
    finally:
        home.close()

    known = 0 if readonly else GRAPHS
    assert counts(first, "hits", "from_bundle") == (GRAPHS, GRAPHS)
    assert counts(second, "hits", "from_bundle") == (known, 0)
    assert first.report.failures == second.report.failures == {}
    assert hosts == [f"bundle:{socket.gethostname()}"] * known
