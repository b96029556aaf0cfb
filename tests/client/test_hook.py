"""The hook acts on cold compiles and on hits of either of Inductor's caches alike, through every door."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.home_daemons import processes_of, wait_for_end
from tests.support.user_program import TRAINING, Run, digests

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

COUNTERS = """
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variable for an Inductor cache that tests share for which it does not matter whether code is compiled anew."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}


WITHOUT_AOT_CACHE = """
import torch._functorch.config
torch._functorch.config.enable_autograd_cache = False
"""


@pytest.mark.slow
def test_a_cold_compile_and_both_cache_hits_are_hooked_and_have_the_same_keys(run: Run) -> None:
    """The mode is part of the key in all of them."""
    program = TRAINING.format(arguments="") + COUNTERS
    in_mode = TRAINING.format(arguments=", mode='reduce-overhead'") + COUNTERS

    cold = run(program)
    from_aot_cache = run(program)
    from_fx_cache = run(WITHOUT_AOT_CACHE + program)
    cold_in_mode = run(in_mode)
    known_in_mode = run(in_mode)

    assert cold.output == cold_in_mode.output == "0 0\n"
    for hit in (from_aot_cache, known_in_mode):
        assert hit.output.split()[1] != "0"
    assert from_fx_cache.output.split()[0] != "0"
    assert from_fx_cache.output.split()[1] == "0"
    assert set(cold.graphs) == {"forward", "backward", "inference"}
    assert cold.graphs == from_aot_cache.graphs == from_fx_cache.graphs
    assert cold_in_mode.graphs == known_in_mode.graphs
    assert not set(cold_in_mode.graphs.values()) & set(cold.graphs.values())
    for outcome in (cold, from_aot_cache, from_fx_cache):
        assert outcome.summary["graphs"] == outcome.summary["looked_up"] == 3
        assert outcome.summary["deployed"] == {"KERNELS": 3, "GRAPH": 0}
        assert outcome.summary["reasons"] == {"no CUDA device": 3}
        assert outcome.summary["measured"] == 0


@pytest.mark.slow
def test_the_summary_says_of_each_graph_how_it_ran_and_whether_that_was_known(
    run: Run, kept: dict[str, str], tmp_path: Path
) -> None:
    """What is to be refreshed is not: it is a miss, and is recorded anew."""
    program = TRAINING.format(arguments="")
    home = tmp_path / "home"
    graphs: list[dict[str, str]] = []
    outcomes = []
    for more in ({}, {}, {"PYGRAPH_REFRESH": "1"}):
        outcomes.append(run(program, PYGRAPHD_HOME=str(home), **kept, **more))
        graphs.append(digests(home))

    for outcome, found, source in zip(outcomes[:2], graphs[:2], ("rule", "cache"), strict=True):
        (environment,) = outcome.summary["environments"]
        assert outcome.summary["environments"][environment]["gpu"] == "none"
        decisions = outcome.summary["decisions"]
        assert {each["kind"]: each["graph"] for each in decisions} == found
        assert {each["environment"] for each in decisions} == {environment}
        assert {
            (each["deployment"], each["reason"]["code"], each["final"], each["source"]) for each in decisions
        } == {("KERNELS", "no_device", True, source)}
        assert outcome.summary["decisions_left_out"] == 0
    summaries = [outcome.summary for outcome in outcomes]
    assert [(each["hits"], each["misses"], each["spooled"]) for each in summaries] == [
        (0, 3, 3), (3, 0, 0), (0, 3, 3),
    ]  # fmt: skip
    because = [[decision["because"] for decision in each["decisions"]] for each in summaries]
    codes = [{reason["code"] if reason else None for reason in each} for each in because]
    assert codes == [{None}, {None}, {"refresh_asked"}]


@pytest.mark.slow
def test_nccl_registers_no_memory_in_captures_of_collectives_unless_the_user_says_so(run: Run) -> None:
    program = """
    import os
    import torch
    import torch._inductor.compile_fx
    print(os.environ.get("NCCL_GRAPH_REGISTER"))
    """
    assert run(program).output == "0\n"
    assert run(program, NCCL_GRAPH_REGISTER="1").output == "1\n"
    assert run(program, PYGRAPH_COLLECTIVES="0").output == "None\n"


def test_the_backend_is_hooked_with_mode_and_options_and_nothing_else_is(run: Run) -> None:
    program = """
    import torch
    function = lambda x: x @ x
    ours = torch.compile(function, backend="pygraph", mode="reduce-overhead")
    options = torch.compile(lambda x: x @ x.t(), backend="pygraph", options={"max_autotune": True})
    theirs = torch.compile(lambda x: x.t() @ x)
    x = torch.randn(9, 9, requires_grad=True)
    ours(x).sum().backward()
    options(torch.randn(5, 3))
    theirs(torch.randn(7, 2))
    print(torch.equal(ours(x), function(x)))
    """
    outcome = run(program, PYGRAPH="0")

    assert outcome.output == "True\n"
    assert outcome.summary["graphs"] == 3
    assert set(outcome.graphs) == {"forward", "backward", "inference"}


def test_a_bad_mode_is_pytorchs_own_error(run: Run) -> None:
    program = """
    import torch
    try:
        torch.compile(torch.sin, backend="pygraph", mode="no-such-mode")(torch.ones(2))
    except Exception as error:
        print("no-such-mode" in str(error))
    """
    assert run(program).output == "True\n"


def test_enable_and_disable_in_code(run: Run) -> None:
    program = """
    import torch, pygraphd
    from torch._inductor.output_code import CompiledFxGraph
    before = CompiledFxGraph.post_compile
    pygraphd.enable()
    pygraphd.enable()
    torch.compile(lambda x: x @ x)(torch.ones(3, 3))
    within = CompiledFxGraph.post_compile
    pygraphd.disable()
    print(within is not before)
    print(CompiledFxGraph.post_compile is before)
    torch.compile(lambda x: x.t() @ x)(torch.ones(3, 3))
    pygraphd.enable()
    torch.compile(lambda x: x @ x.t())(torch.ones(3, 3))
    """
    outcome = run(program, PYGRAPH="")

    assert outcome.output == "True\nTrue\n"
    assert outcome.summary["graphs"] == 1  # of the session that was open at the end


def test_a_profile_before_the_first_compilation_is_known(run: Run) -> None:
    """CUPTI has been there since."""
    program = """
    import sys, torch
    from torch.profiler import ProfilerActivity, profile
    from pygraphd.client.backend import torch_private
    print("torch._inductor.compile_fx" in sys.modules, torch_private.was_profiled())
    import pygraphd
    pygraphd.disable()  # what is compiled runs on
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        print(torch_private.is_profiled())
    print(torch_private.is_profiled(), torch_private.was_profiled())
    """

    assert run(program).output == "False False\nTrue\nFalse True\n"


def test_a_profile_before_enable_may_have_been_missed(run: Run) -> None:
    program = """
    import torch, pygraphd
    pygraphd.enable()
    from pygraphd.client.backend import torch_private
    print(torch_private.was_profiled())
    """

    assert run(program, PYGRAPH="").output == "True\n"


def test_a_failure_of_ours_is_counted_and_not_seen(run: Run) -> None:
    program = """
    import torch
    from pygraphd.client.frontend import runtime
    def fail(*args):
        raise KeyError("ours")
    runtime.Runtime.compiled_graph = fail
    print(torch.compile(lambda x: x @ x)(torch.ones(2, 2)).tolist())
    """
    outcome = run(program)

    assert outcome.output == "[[2.0, 2.0], [2.0, 2.0]]\n"
    assert outcome.summary["failures"] == {
        "daemon: not started: PYGRAPHD_AUTOSTART=0": 1,
        "planning: KeyError: 'ours'": 1,
    }


def test_a_torch_without_a_needed_name_is_left_alone(run: Run) -> None:
    program = """
    import torch, torch._inductor.output_code
    del torch._inductor.output_code.maybe_realign_inputs
    print(torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2)).tolist())
    import torch._inductor.compile_fx
    """
    outcome = run(program)

    assert outcome.output == "[2.0, 2.0]\n"
    assert outcome.summary["graphs"] == 0


@pytest.mark.slow
def test_a_forked_child_compiles_with_a_session_of_its_own(run: Run) -> None:
    program = """
    import os, torch, torch._inductor.config
    torch._inductor.config.compile_threads = 1
    torch.compile(lambda x: x @ x)(torch.ones(2, 2))
    child = os.fork()
    if child == 0:
        torch.compile(lambda x: x.t() @ x)(torch.ones(2, 2))
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    """
    outcome = run(program)

    assert outcome.output == "0\n"
    assert outcome.summary["graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_of_multiprocessing_compiles_with_a_session_of_its_own(
    run: Run, tmp_path: Path, method: str
) -> None:
    """It is a new Python, which imports the program, or a fork of one; `multiprocessing` ends the latter without what `atexit` knows."""
    program = f"""
    import multiprocessing, os, pygraphd, torch
    def compile_another():
        print(torch.compile(lambda x: x.t() @ x)(torch.ones(2, 2)).tolist(), os.getpid(), flush=True)
        if {method == "forkserver"}:
            pygraphd.disable()  # closes the session
    if __name__ == "__main__":
        torch.compile(lambda x: x @ x)(torch.ones(2, 2))
        child = multiprocessing.get_context({method!r}).Process(target=compile_another)
        child.start()
        child.join()
        print(child.exitcode, os.getpid())
    """
    outcome = run(program, PYGRAPHD_HOME=str(tmp_path / "home"))

    child, parent = (line.rsplit(maxsplit=1) for line in outcome.output.splitlines())
    assert (child[0], parent[0]) == ("[[2.0, 2.0], [2.0, 2.0]]", "0")
    of_child = json.loads((tmp_path / "1" / f"summary.json.{child[1]}").read_text())
    recorded = {}
    for pid, summary in ((parent[1], outcome.summary), (child[1], of_child)):
        assert (summary["graphs"], summary["looked_up"], summary["spooled"]) == (1, 1, 1)
        (file,) = (tmp_path / "home" / "spool").glob(f"*-{pid}.json")
        (record,) = json.loads(file.read_text())["records"]
        (decision,) = summary["decisions"]
        recorded[pid] = record["graph"]["digest"]
        assert decision["graph"] == recorded[pid]
    assert len(set(recorded.values())) == 2
    for process in processes_of(tmp_path / "home"):
        wait_for_end(process)  # as those end that torch and `multiprocessing` have started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "environ"),
    [
        (TRAINING.format(arguments=""), {}),
        (TRAINING.format(arguments=""), {"PYGRAPH": "0", "THROUGH": "-m pygraphd run --"}),
        ("import pygraphd; pygraphd.enable()\n" + TRAINING.format(arguments=""), {}),
        (TRAINING.format(arguments=', backend="pygraph"'), {}),
    ],
    ids=["PYGRAPH=1", "run", "enable", "backend"],
)
def test_a_program_can_be_rid_of_us_whatever_asks_for_us(
    run: Run, kept: dict[str, str], program: str, environ: dict[str, str]
) -> None:
    check = """
import os, pathlib, sys
pathlib.Path(os.environ["PYGRAPH_SUMMARY"]).write_text("{}")  # for the harness: we must not write it
print("pygraphd.client.frontend.runtime" in sys.modules)
"""
    outcome = run(program + check, PYGRAPH_DISABLE="1", **kept, **environ)

    assert outcome.output == "False\n"
    assert outcome.summary == {}
    assert outcome.graphs == {}


def test_a_cache_that_is_only_read_stays_as_it_is(run: Run, kept: dict[str, str]) -> None:
    """And an option that is not understood is named in one line."""
    program = TRAINING.format(arguments="")
    outcome = run(program, PYGRAPH_READONLY="1", PYGRAPH_REFRESH="maybe", **kept)

    summary = outcome.summary
    assert outcome.graphs == {}
    assert (summary["graphs"], summary["recorded"], summary["spooled"], summary["withheld"]) == (3, 0, 0, 3)
    assert summary["failures"]["PYGRAPH_REFRESH=maybe is not understood: set it to 1 or 0"] == 1


def test_disabling_gives_back_what_was_sent_to_a_gpu(run: Run) -> None:
    outcome = run(
        """
import pygraphd, torch
pygraphd.enable()
from pygraphd.client.placement import upload
value = torch.ones(2)
upload.sender.send([value], torch.device("cpu"), upload.specs_text([value]), "a graph")
kept = len(upload.sender)
pygraphd.disable()
print(kept, len(upload.sender))
""",
    )

    assert outcome.output == "1 0\n"


BREAKING = """
import torch

@torch.compile(backend="pygraph")
def f(x):
    y = x.sum().item()  # line 6
    if x.sum() > 0:  # line 7
        x = x + 1
    return x * y

f(torch.ones(3))
"""


@pytest.mark.slow
def test_the_summary_says_where_dynamo_has_ended_a_graph_and_why(run: Run) -> None:
    breaks = run(BREAKING).summary["graph_breaks"]

    item, branch = sorted(breaks, key=lambda each: each.rpartition(":")[2])
    assert "Tensor.item()" in item
    assert item.endswith("program.py:6)")
    assert "generic_jump" in branch
    assert branch.endswith("program.py:7)")


BREAKING_WITHIN = """
import torch

@torch.compile(backend="pygraph")
def f(x):
    torch.nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True)  # line 6
    return x * 2

x = torch.ones(3, requires_grad=True)
x.grad = torch.ones(3)
f(x)
"""


@pytest.mark.slow
def test_of_what_breaks_within_pytorch_the_summary_has_the_line_that_calls_it(run: Run) -> None:
    breaks = run(BREAKING_WITHIN).summary["graph_breaks"]

    assert breaks
    assert [each for each in breaks if not each.endswith("program.py:6)")] == []
