"""The rules as Inductor applies them: in real compilations, with its caches, beside passes of the user's, and never in the way."""

from __future__ import annotations

import importlib
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass, virtualized
from torch._inductor.custom_graph_pass import CustomGraphPass

from pygraphd.client.backend import torch_private
from pygraphd.client.common.report import Report
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.installation import Hook
from pygraphd.client.placement import constants, fx_utils, pipeline, provenance
from pygraphd.client.placement.pipeline import FILES, Placement
from tests.support.placement.graphs import COPY, Builder, place
from tests.support.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph

    from tests.support.user_program import Run

pytestmark = pytest.mark.torch


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Have the rules take this CPU for a GPU, too, so that they have something to do; return what they report to."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fx_utils, "is_gpu", lambda device: True)
    with with_rules() as report:
        yield report


def pick(x: torch.Tensor) -> torch.Tensor:
    """Pick by more indices than Inductor writes into its code."""
    return x[:, torch.tensor([5, 3, 1, 0, 2, 4, 6, 8, 7, 9, 11, 10])] @ x[:, :12].t()


@pytest.mark.slow
def test_inductor_lowers_what_the_rules_have_changed_and_finds_it_in_its_caches(added: Report) -> None:
    x = torch.randn(3, 12, requires_grad=True)
    expected = pick(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    for hits in (0, 2):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(pick)

        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], gradient)

        found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert (found > 0) == (hits > 0)
        assert added.counts["placed"] == 2 + hits  # in the forward and in the backward
    assert added.failures == {}


def constant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of a constant, and multiply by it."""
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    return weights, x @ weights


@pytest.fixture
def _with_copies() -> Iterator[None]:
    """Have every constant be copied to where it is, which Inductor would see through by itself."""

    def copy_constants(graph: Graph) -> None:
        for node in list(graph.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default)):
            with graph.inserting_after(node):
                copy = graph.call_function(COPY, (node, torch.device("cpu")))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)

    remove = torch_private.add_pass(copy_constants, (__file__,))
    yield
    remove()


def test_another_list_makes_another_constant_at_the_very_next_call(added: Report) -> None:
    rows = [5, 3, 1, 0, 2, 4, 6, 8, 7, 9, 11, 10]

    def picked(x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.tensor(rows)] @ x[:, :12].t()

    compiled, x = torch.compile(picked), torch.randn(3, 12)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), picked(x))
        rows.append(rows.pop(0))

    assert added.failures == {}
    assert added.counts["placed"] >= 1  # later ones are compiled for any numbers


@pytest.mark.usefixtures("_with_copies")
def test_a_copy_that_is_returned_is_the_users_to_change(added: Report) -> None:
    compiled, x = torch.compile(constant), torch.randn(3, 3)

    for _ in range(3):
        for result, expected in zip(compiled(x), constant(x), strict=True):
            torch.testing.assert_close(result, expected)
            result.zero_()

    assert added.counts["placed"] == 1
    assert added.failures == {}


def branch(x: torch.Tensor) -> torch.Tensor:
    return x[:, torch.tensor([2, 1, 0])]


def branching(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(p, branch, lambda x: x[:, :3] * 2, (x,))


@pytest.mark.slow
def test_graphs_within_graphs_are_left_alone(added: Report) -> None:
    x = torch.randn(3, 12)

    for which in (True, False):
        p = torch.tensor(which)
        torch.testing.assert_close(torch.compile(branching)(p, x), branching(p, x))

    assert (added.counts["placed"], added.counts["placed_inputs"], added.failures) == (0, 0, {})
    said = f"{pipeline.IN_SUBGRAPH} ({__file__}:{branch.__code__.co_firstlineno + 1})"
    assert any(each.endswith(said) for each in added.summary()["left_on_cpu"])


class Buffered(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, index: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.index] @ x[:, :12].t()


def test_frozen_parameters_are_left_alone(added: Report) -> None:
    """Inductor's caches hold what is made of them, and find it for others."""
    x = torch.randn(3, 12)
    with torch.no_grad(), inductor_config.patch(freezing=True):
        for shift in range(2):
            torch._dynamo.reset()
            model = Buffered(torch.roll(torch.arange(12), shift)).eval()
            torch.testing.assert_close(torch.compile(model)(x), model(x))

    assert (added.counts["placed"], added.failures) == (0, {})
    said = f"{pipeline.FROZEN} ({__file__}:{Buffered.forward.__code__.co_firstlineno + 1})"
    assert any(each.endswith(said) for each in added.summary()["left_on_cpu"])


def test_what_is_compiled_in_another_thread_is_changed_too(added: Report) -> None:
    """As most backwards are, on autograd's thread."""
    x = torch.randn(3, 12, requires_grad=True)
    result = torch.compile(pick)(x).sum()
    thread = threading.Thread(target=result.backward)
    thread.start()
    thread.join()

    torch.testing.assert_close(x.grad, torch.autograd.grad(pick(x).sum(), x)[0])
    assert added.counts["placed"] == 2


def test_after_its_end_no_thread_goes_on_with_it() -> None:
    calls: list[str] = []
    seen: list[Any] = []
    done, removed = threading.Event(), threading.Event()
    remove = torch_private.add_pass(lambda graph: calls.append("ours"), FILES)

    def other() -> None:
        seen.append(torch_private.current_pass())
        done.set()
        removed.wait(10)
        seen[0](None)

    thread = threading.Thread(target=other)
    thread.start()
    assert done.wait(10)
    remove()
    removed.set()
    thread.join()

    assert seen[0] is not None
    assert (calls, torch_private.current_pass()) == ([], None)


def test_what_goes_wrong_is_counted_and_leaves_the_graph_as_it_was(
    added: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(constants, "place_constants", fail)
    x = torch.randn(3, 12)

    torch.testing.assert_close(torch.compile(pick)(x), pick(x))

    assert added.failures == {"placement: RuntimeError: broken": 1}


def test_what_fails_is_told_by_whoever_finds_the_graph_in_the_caches_too(
    added: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "fake_on", mock.Mock(side_effect=RuntimeError("broken")))
    x = torch.randn(3, 12)

    for calls in (1, 2):
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(torch.compile(pick)(x), pick(x))
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert (hits > 0) == (calls > 1)
        assert added.failures == {"placement: RuntimeError: broken": calls}


def test_a_rule_that_fails_takes_nothing_back_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent by then is sent, so it counts, and its line is known."""
    monkeypatch.setattr(constants, "place_constants", mock.Mock(side_effect=RuntimeError("broken")))
    build = Builder()
    x, index = build.input(torch.randn(4)), build.input(torch.tensor([1, 0]), on_gpu=False)
    mask = build.input(torch.tensor([True, False]), on_gpu=False)
    graph = build.output(build.index(build.index(x, index), mask))

    with inductor_config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        report = applied(graph)

    assert report.failures == {"placement: RuntimeError: broken": 1}
    assert report.counts["placed_inputs"] == 1
    assert [fx_utils.A_MASK in each for each in report.summary()["left_on_cpu"]] == [True]


def applied(graph: Graph) -> Report:
    """Apply the rules; return what they say of a graph that is compiled meanwhile."""
    before, report = counters["inductor"].copy(), Report()
    Placement(lambda: report, place)(graph)
    compiled = SimpleNamespace(counter_deltas=counters["inductor"] - before)
    provenance.report_results(compiled, report)
    return report


def likely(x: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x, spread, validate_args=False).log_prob(x)


def test_the_line_is_the_users_and_not_one_of_pytorchs(added: Report) -> None:
    torch.compile(likely)(torch.randn(3), torch.tensor(2.0))

    line = f"({__file__}:{likely.__code__.co_firstlineno + 1})"
    left = added.summary()["left_on_cpu"]
    assert left
    assert [each for each in left if not each.endswith(line)] == []


def test_what_is_left_is_said_once_with_its_line() -> None:
    build = Builder()
    x, index = build.input(torch.randn(4)), build.input(torch.tensor([1]), on_gpu=False)
    computed = build.call(torch.ops.aten.add.Tensor, build.input(torch.tensor([1]), on_gpu=False), 1)
    graph = build.output(build.index(x, index), build.index(x, computed))

    report = applied(graph)

    reasons = [reason.partition(": ")[2] for reason in report.summary()["left_on_cpu"]]
    assert reasons == [f"{pipeline.NOT_SPLIT} (model.py:12)", f"{constants.INPUT} (model.py:12)"]


def test_buffers_of_a_package_keep_their_names() -> None:
    """AOTInductor makes attributes of a graph of them, and whoever loads the package may replace them by name."""
    build = Builder()
    x = build.input(torch.randn(4))
    graph = build.output(build.index(x, build.constant(torch.tensor([1, 0, 1]))))
    before = str(graph)

    with virtualized.V.set_aot_compilation(True):
        report = applied(graph)

    assert str(graph) == before
    assert report.counts["placed"] == 0
    assert applied(graph).counts["placed"] == 1


@pytest.mark.parametrize("how", ["marked", "waits", "neither"])
def test_inputs_of_a_graph_that_uses_streams_are_left_where_they_are(how: str) -> None:
    """They would be sent on the current stream, for which nothing makes the others wait."""
    build = Builder()
    scalar = build.input(torch.tensor(2.0), on_gpu=False)
    taken = build.call(torch.ops.aten.mul.Tensor, build.input(torch.randn(4)), scalar)
    graph = build.output(taken)
    if how == "marked":
        taken.meta["custom"] = {"stream": 7}
    elif how == "waits":
        with graph.inserting_before(taken):
            graph.call_function(torch.ops.streams.wait_stream.default, (1, 0))

    with (
        inductor_config.patch({"triton.cudagraphs": False}),
        mock.patch.object(torch_private, "graphs_are_split", return_value=True),
    ):
        reason = pipeline._why_skip_inputs(graph)

    assert reason == (None if how == "neither" else pipeline.ON_STREAMS)


def test_both_rules_work_on_one_graph() -> None:
    build = Builder()
    x, index = build.input(torch.randn(4)), build.input(torch.tensor([1, 0]), on_gpu=False)
    constant = build.call(torch.ops.aten.lift_fresh_copy.default, build.constant(torch.tensor([1, 0, 1])))
    graph = build.output(build.index(build.index(x, index), constant))

    with inductor_config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        report = applied(graph)

    graph.lint()
    assert (report.counts["placed"], report.counts["placed_inputs"]) == (1, 1)
    assert report.summary()["left_on_cpu"] == {}


class Theirs(CustomGraphPass):  # type: ignore[misc]
    """A pass of the user's."""

    def __init__(self, name: str | None, log: list[str]) -> None:
        self._name = name
        self._log = log

    def __call__(self, graph: Graph) -> None:
        self._log.append("theirs")

    def uuid(self) -> str | None:
        return self._name


def test_passes_of_the_users_come_first_and_keep_their_say_in_the_caches() -> None:
    log: list[str] = []

    def ours(graph: Graph) -> None:
        log.append("ours")

    alone = torch_private.pass_after(None, ours, FILES).uuid()
    named = torch_private.pass_after(Theirs("one", log), ours, FILES)
    assert len({alone, named.uuid(), torch_private.pass_after(Theirs("two", log), ours, FILES).uuid()}) == 3
    assert named.uuid() == torch_private.pass_after([Theirs("one", log)], ours, FILES).uuid()
    assert torch_private.pass_after(Theirs(None, log), ours, FILES).uuid() is None
    assert torch_private.pass_after(ours, ours, FILES).uuid() is None  # a plain function has no name

    graph = torch.fx.Graph()
    graph.output(None)
    named(graph)

    assert log == ["theirs", "ours"]


@pytest.mark.parametrize("before", [None, len, [len, len]], ids=["none", "one", "several"])
def test_a_pass_is_saved_as_what_was_there_before(before: Any) -> None:
    """A compiled module is saved with all of Inductor's options, and is loaded where PyGraph may not be installed."""
    saved = pickle.dumps(torch_private.pass_after(before, lambda graph: None, FILES))

    assert b"pygraph" not in saved
    assert pickle.loads(saved) == before


def test_what_is_compiled_once_they_are_off_is_kept_apart_from_what_they_have_changed() -> None:
    """A thread goes on with the pass that it has taken up, which does nothing any more."""
    remove = torch_private.add_pass(lambda graph: None, FILES)
    taken_up = torch_private.current_pass()
    on = taken_up.uuid()
    remove()

    assert on != taken_up.uuid() is not None


def test_caches_tell_apart_what_any_file_of_the_rules_has_made() -> None:
    folders = [Path(module.__file__ or "").parent for module in (pipeline, torch_private)]

    assert {str(each) for folder in folders for each in folder.glob("*.py")} == set(FILES)


def test_a_pass_that_is_replaced_stays_replaced() -> None:
    mine = Theirs("one", [])
    remove = torch_private.add_pass(lambda graph: None, FILES)
    with inductor_config.patch({torch_private.PASS_OPTION: mine}):
        remove()
        assert inductor_config.post_grad_custom_pre_pass is mine
    remove()
    assert inductor_config.post_grad_custom_pre_pass is None


def test_a_pass_that_takes_more_is_left_alone(hook: Callable[..., Hook]) -> None:
    takes_more: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if takes_more is None:
        pytest.skip("torch 2.11 has no such passes")
    theirs = type("Aware", (takes_more,), {"__call__": lambda *_: None, "uuid": lambda _: "aware"})()
    with inductor_config.patch({torch_private.PASS_OPTION: theirs}):
        made = hook()
        assert torch_private.current_pass() is theirs
        assert made.with_placement(None) == {}
        assert made.runtime is not None
        assert (
            made.runtime.report.failures[
                "adding a pass: TypeError: a pass of the user's takes more than the graph"
            ]
            == 2
        )


def test_backend_pygraph_keeps_a_pass_that_was_set_for_all(hook: Callable[..., Hook]) -> None:
    log: list[str] = []
    with inductor_config.patch({torch_private.PASS_OPTION: Theirs("one", log)}):
        options = hook(everything=False).with_placement(None)

    graph = torch.fx.Graph()
    graph.output(None)
    options[torch_private.PASS_OPTION](graph)

    assert log == ["theirs"]


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Hook]]:
    """Return what makes a hook of its own, on."""
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    monkeypatch.setenv("PYGRAPHD_AUTOSTART", "0")
    importlib.import_module(torch_private.COMPILE_FX)  # else the hook waits for that
    made: list[Hook] = []

    def make(*, everything: bool = True) -> Hook:
        made.append(Hook())
        made[-1].enable(everything=everything)
        return made[-1]

    yield make
    for each in made:
        each.disable()


def test_the_hook_adds_the_pass_and_takes_it_out(
    hook: Callable[..., Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = hook()
    assert is_added()
    assert one.with_placement({"shape_padding": True}) == {"shape_padding": True}  # it is there already
    one.disable()
    assert not is_added()

    backend_alone = hook(everything=False)
    assert not is_added()
    assert set(backend_alone.with_placement(None)) == {torch_private.PASS_OPTION}
    backend_alone.enable()
    assert is_added()
    backend_alone.disable()

    monkeypatch.setenv(settings.PLACEMENT, "0")
    without = hook()
    assert not is_added()
    assert without.with_placement(None) == {}


def is_added() -> bool:
    return inductor_config.post_grad_custom_pre_pass is not None


# Matrix products alone: no C++ compiler takes its seconds.
PROGRAM = """
import torch

x = torch.randn(3, 3)
for arguments in ({}, {"backend": "pygraph"}):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x @ x, **arguments)
    torch.testing.assert_close(compiled(x), x @ x)
"""


def test_on_the_cpu_there_is_nothing_to_do(run: Run) -> None:
    outcome = run(PROGRAM)

    assert [outcome.summary[name] for name in ("placed", "placed_inputs", "sent")] == [0, 0, 0]
    assert outcome.summary["left_on_cpu"] == {}
    assert not [text for text in outcome.summary["failures"] if not text.startswith("daemon: ")]
    assert "Warning" not in outcome.output
