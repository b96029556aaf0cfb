"""Programs on relocatable graphs: what breaks PyTorch's own graphs, streams, threads, captures, training, faults, memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend.errors import IN_A_CAPTURE, LayoutMismatch
from pygraphd.client.recording import device_waits, recordings
from pygraphd.client.recording.capture import NOT_CACHED, SYNC_DEBUG
from pygraphd.client.recording.device_waits import GPU_WAITS
from tests.support.gpu_programs import affine, compiled, losses, network, warm, x
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_two_results_in_a_row_are_both_right(relocated: Relocated) -> None:
    run = compiled(affine)
    warm(run, x())
    a = x()

    y1, y2 = run(a), run(a)

    assert torch.equal(y1, y2)
    assert torch.equal(y1, affine(a))
    assert y1.data_ptr() != y2.data_ptr()
    relocated.expect_all_captured()


@contextlib.contextmanager
def waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def nothing_is_cached() -> Iterator[None]:
    torch.cuda.caching_allocator_enable(False)
    yield
    torch.cuda.caching_allocator_enable(True)


@pytest.mark.parametrize(("within", "reason"), [(waits_raise, SYNC_DEBUG), (nothing_is_cached, NOT_CACHED)])
def test_a_debugging_aid_puts_off_a_recording_and_forbids_none(
    relocated: Relocated, within: Callable[[], contextlib.AbstractContextManager[None]], reason: str
) -> None:
    run, a = compiled(affine), x()
    right = affine(a)
    run(a)
    with within():
        results = [run(a) for _ in range(3)]
    assert relocated.report.counts["captured"] == 0
    assert relocated.report.fallbacks[reason] == 3

    results += [run(a) for _ in range(20)]

    for each in results:
        torch.testing.assert_close(each, right)
    assert relocated.report.counts["captured"] == 1
    assert refusal_of(relocated.made[0]) is None


def test_a_result_is_an_input(relocated: Relocated) -> None:
    f, g = compiled(affine), compiled(lambda x: x.exp() + 1)
    warm(f, x())
    warm(g, x())
    a = x()

    torch.testing.assert_close(f(f(a)), affine(affine(a)))
    torch.testing.assert_close(g(f(a)), affine(a).exp() + 1)
    relocated.expect_all_captured()


def test_recurrent_layers_elsewhere_keep_the_state_of_their_dropout(relocated: Relocated) -> None:
    run = compiled(lambda x: torch.nn.functional.dropout(x.sin(), 0.5))
    lstm = torch.nn.LSTM(16, 16, num_layers=2, dropout=0.5, device="cuda").train()
    a, generator = torch.randn(4, 8, 16, device="cuda"), torch.cuda.default_generators[0]

    def drawn_by_lstm() -> int:
        before = generator.get_offset()
        lstm(a)
        drawn: int = generator.get_offset() - before
        return drawn

    drawn_by_lstm()  # the first makes the state
    alone = drawn_by_lstm()
    warm(run, a)
    drawn_by_lstm()  # a recording may have put the generator back

    run(a)

    assert drawn_by_lstm() == alone
    relocated.expect_all_captured()


def test_a_thousand_kept_results_stay_right(relocated: Relocated) -> None:
    run = compiled(affine)
    inputs = [torch.full((100,), float(i), device="cuda") for i in range(1000)]

    kept = [run(each) for each in inputs]

    assert torch.equal(torch.stack(kept), affine(torch.stack(inputs)))
    relocated.expect_all_captured()


@pytest.mark.parametrize("kernels", [1, 2])
def test_inputs_and_results_that_never_lie_where_any_has_lain(relocated: Relocated, kernels: int) -> None:
    def halved(x: torch.Tensor) -> torch.Tensor:
        return affine(x)[: x.numel() // 2].cumsum(0)

    run = compiled(affine if kernels == 1 else halved)
    warm(run, x())
    ((replay,),) = (each.replays for each in relocated.made)
    before, inputs = replay.counts.written, [x() for _ in range(400)]

    results = [run(each) for each in inputs]
    again = [run(inputs[-1]) for _ in range(10)]

    for each, result in zip(inputs + [inputs[-1]] * 10, results + again, strict=True):
        torch.testing.assert_close(result, affine(each) if kernels == 1 else halved(each))
    assert replay.executables <= 2  # one of them of the calls before
    assert replay.counts.written - before >= 400
    relocated.expect_all_captured()


def test_inputs_may_be_freed_right_after_the_call(relocated: Relocated) -> None:
    run = compiled(lambda x: x.cumsum(0))
    results = []
    for i in range(50):
        results.append(run(torch.full((100_000,), float(i), device="cuda")))
        torch.full((100_000,), -1.0, device="cuda")  # takes the memory that has become free

    assert [each[9].item() for each in results] == [10.0 * i for i in range(50)]
    relocated.expect_all_captured()


def test_a_cache_is_changed_in_place(relocated: Relocated) -> None:
    def step(cache: torch.Tensor, position: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, value)
        return cache.sum(0)

    run = compiled(step)
    cache, expected = (torch.zeros(64, 8, device="cuda") for _ in range(2))
    for i in range(20):
        position, value = torch.tensor([i], device="cuda"), torch.randn(1, 8, device="cuda")
        torch.testing.assert_close(run(cache, position, value), step(expected, position, value))
        torch.testing.assert_close(cache, expected)
    relocated.expect_all_captured()


def test_inputs_that_start_to_be_one_tensor(relocated: Relocated) -> None:
    run = compiled(lambda a, b: a * 3 + b)
    warm(run, x(), x())
    a = x()

    torch.testing.assert_close(run(a, a.detach()), a * 4)
    relocated.expect_all_captured()


def test_views_with_odd_offsets(relocated: Relocated) -> None:
    run = compiled(affine)
    base = x(5000)
    for offset in (0, 0, 0, 1, 3, 4, 16, 64, 7, 4, 0, 16):
        view = base[offset : offset + 1000]
        torch.testing.assert_close(run(view), affine(view))

    # Of what is not aligned to 16 bytes Inductor makes copies. The second that is aligned to 16 or 64 is recorded anew, and all later ones fit.
    [region] = relocated.made
    [replay] = region.replays
    assert relocated.report.fallbacks == {recordings.NOT_YET: 1, LayoutMismatch.ALIGNMENT.value: 1}
    assert relocated.report.counts["captured"] == 2
    assert replay.counts.replays >= 5  # one is the trial of the recording


def test_inputs_that_overlap_only_at_first(relocated: Relocated) -> None:
    run = compiled(lambda a, b: a * 3 + b)
    base = x(5000)
    for i in range(10):
        a, b = base[:1000], base[64 * 4 * (i if i < 3 or i > 7 else 10) :][:1000]
        torch.testing.assert_close(run(a, b), a * 3 + b)

    assert relocated.report.counts["captured"] == 2
    assert set(relocated.report.fallbacks) == {recordings.NOT_YET, LayoutMismatch.OVERLAP.value}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_goes_as_without_graphs(
    relocated: Relocated, optimizer: str, dropout: float, micro_batches: int
) -> None:
    """With dropout too: the random numbers are those that KERNELS draw."""
    plain, mine = network(dropout), network(dropout)
    run = torch.compile(plain, dynamic=False)
    expected = losses(run, list(plain.parameters()), optimizer, micro_batches)
    assert relocated.made == []  # compiled without CUDA Graphs

    got = losses(compiled(mine), list(mine.parameters()), optimizer, micro_batches)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    relocated.expect_all_captured()
    assert len(relocated.made) == 2


def test_two_forwards_before_a_backward(relocated: Relocated) -> None:
    mine, plain = network(), network()
    run = compiled(mine)
    for _ in range(6):
        a, b = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
        for model, module in ((run, mine), (plain, plain)):
            first, second = model(a), model(b)
            first.sum().backward()
            (second * 2).sum().backward()
            assert module is not None
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    relocated.expect_all_captured()


def test_a_graph_that_is_retained(relocated: Relocated) -> None:
    mine = network()
    run = compiled(mine)
    batch = torch.randn(32, 64, device="cuda")
    for _ in range(4):
        mine.zero_grad()
        loss = run(batch).sum()
        loss.backward(retain_graph=True)
        once = [each.grad.clone() for each in mine.parameters()]
        loss.backward()
        for each, before in zip(mine.parameters(), once, strict=True):
            torch.testing.assert_close(each.grad, 2 * before)
    assert relocated.report.counts["captured"] > 0


def test_parameters_whose_storage_is_replaced(relocated: Relocated) -> None:
    mine = network()
    run = compiled(mine)
    with torch.no_grad():
        for i in range(8):
            for parameter in mine.parameters():
                parameter.data = parameter.data.clone() * (1 + 0.01 * i)
            batch = torch.randn(32, 64, device="cuda")
            torch.testing.assert_close(run(batch), mine(batch))
    relocated.expect_all_captured()


def test_other_streams(relocated: Relocated) -> None:
    run = compiled(lambda x: x.cumsum(0) * 2)
    warm(run, x(100_000))
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [x(100_000) for _ in range(60)]
    torch.cuda.synchronize()
    results = []
    for i, each in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            results.append(run(each))
    torch.cuda.synchronize()

    for each, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, each.cumsum(0) * 2, rtol=1e-4, atol=0.02)
    relocated.expect_all_captured()


def test_two_threads(relocated: Relocated) -> None:
    run = compiled(affine)
    warm(run, x())
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(200):
                each = torch.full((1000,), float(number * 1000 + i), device="cuda")
                if not torch.equal(run(each), affine(each)):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    relocated.expect_all_captured()


def test_within_a_capture_of_the_users_it_runs_as_kernels(relocated: Relocated) -> None:
    run = compiled(affine)
    static = x()
    warm(run, static)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        result = run(static)
    static.copy_(x())
    graph.replay()

    torch.testing.assert_close(result, affine(static))
    assert relocated.report.fallbacks[IN_A_CAPTURE] == 1


@pytest.mark.parametrize("has_other_ranks", [False, True])
def test_nothing_waits_for_work_that_waits_for_what_comes_after_the_calls(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch, has_other_ranks: bool
) -> None:
    """A stream waits for a flag, which the program sets later; with other ranks it stands for a posted receive."""
    monkeypatch.setattr(device_waits, "has_other_ranks", lambda: has_other_ranks)
    monkeypatch.setattr(device_waits, "WAITS_S", 0.0)
    # On the host, so that its writing needs no kernel: to load one may wait for the device.
    flag, receiving = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Stream()
    run, a = compiled(affine), x()
    torch.testing.assert_close(run(a), affine(a))
    torch.cuda.synchronize()
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def send() -> None:
        flag.fill_(1)

    assert wait(receiving.cuda_stream, flag.data_ptr(), 1, 0) == 0
    rescue = threading.Timer(60, send)
    rescue.start()
    try:
        for _ in range(8):
            torch.testing.assert_close(run(a), affine(a))
        assert not receiving.query()
        assert relocated.report.fallbacks[GPU_WAITS] == 8
    finally:
        rescue.cancel()
        send()
        torch.cuda.synchronize()
    for _ in range(30):
        torch.testing.assert_close(run(a), affine(a))
    assert relocated.report.counts["captured"] == 1


def test_numbers_are_drawn_from_the_state_that_the_default_generator_has(relocated: Relocated) -> None:
    a, default = torch.ones(4096, device="cuda"), torch.cuda.default_generators[0]
    states = [default.graphsafe_get_state(), default.clone_state()]

    def drawn(run: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        for seed, state in enumerate(states):
            state.manual_seed(seed)
        results = []
        for which in (0, 1, 1, 0, 1, 0, 0, 1):
            default.graphsafe_set_state(states[which])
            results.append(run(a))
        return results, [state.get_offset() for state in states]

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    try:
        with relocated.as_kernels():
            expected, ends = drawn(compiled(dropped))
        run = compiled(dropped)
        warm(run, a)
        found, found_ends = drawn(run)
    finally:
        default.graphsafe_set_state(states[0])

    assert all(map(torch.equal, found, expected))
    assert found_ends == ends == [ends[0]] * 2 != [0, 0]
    assert not torch.equal(found[0], found[1])
    relocated.expect_all_captured()


def test_while_the_history_of_memory_is_recorded(relocated: Relocated) -> None:
    run = compiled(affine)
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        a = x()
        for _ in range(3):
            torch.testing.assert_close(run(a), affine(a))
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)

    assert trace
    assert any("history" in reason for reason in relocated.report.fallbacks)
