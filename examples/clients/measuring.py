"""What the examples here share: their options, the time of each step, values to compare, and the line that ends a run.

A run prints `RESULT` and one JSON object: the median time of its last steps, each waited for, its memory, and `checks`, lists of
numbers that a run in another mode has to come close to.
"""

import argparse
import datetime
import gc
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The examples make their models from configurations; no library is to look for anything on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = ("none", "default", "reduce-overhead")
STEPS = 160
_MOST_TIMED = 40
_LOOKED_AT = 5
_BESIDE = 3
"""Steps in which a program compiles, while others may run beside it."""
_TURN = "MEASURING_TURN"
"""The variable by which `python -m benchmarks clients` names a file; beside it lie those that say whose turn it is."""
_LONGEST_TURN_S = 600.0


class Clock:
    """Times the last quarter of a program's steps, at most 40: it waits for the GPU before and after each.

    A step may consist of `parts`, as generated tokens; times are then those of a part.
    """

    def __init__(self, steps: int, parts: int = 1) -> None:
        self.steps = steps
        self.values: list[float] = []
        self._parts = parts
        self._timed_from = steps - max(1, min(_MOST_TIMED, steps // 4))
        self._alone_from = min(_BESIDE, max(1, steps // 4))
        self._looked_at = {round(number * (steps - 1) / (_LOOKED_AT - 1)) for number in range(_LOOKED_AT)}
        self._done = 0
        self._began = 0.0
        self._first_s = 0.0
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Begin a step."""
        if self._done == self._alone_from:
            _wait_for_turn()
        if self._is_timed:
            _wait()
        self._began = time.perf_counter()

    def end(self, value: torch.Tensor | None = None) -> None:
        """End a step; `value` is a result of it, whose mean size is kept after a few of the steps."""
        if self._is_timed:
            _wait()
        seconds = time.perf_counter() - self._began
        if self._done == 0:
            self._first_s = seconds
        if self._done >= self._timed_from:
            self._seconds.append(seconds / self._parts)
        if value is not None and self._done in self._looked_at:
            self.values.append(value.detach().float().abs().mean().item())
        self._done += 1

    @property
    def _is_timed(self) -> bool:
        return self._done == 0 or self._done >= self._timed_from

    def result(
        self, tolerance: float, eager_tolerance: float | None = None, **checks: list[float]
    ) -> dict[str, Any]:
        """Return the result of a run.

        `tolerance` is the relative difference to a compiled run at which values still agree. `eager_tolerance` is the same for a run
        without compiling, where compiled code draws other random numbers.
        """
        if self.values:
            checks = {"values": self.values, **checks}
        return {
            "step_ms": round(1e3 * statistics.median(self._seconds), 4),
            "first_step_s": round(self._first_s, 2),
            "steps": self._done,
            "checks": checks,
            "tolerance": tolerance,
            "eager_tolerance": eager_tolerance or tolerance,
        }


def compiled(function: Any, mode: str, **options: Any) -> Any:
    """Return `torch.compile` of a module or function, or with mode `none` itself."""
    return function if mode == "none" else torch.compile(function, mode=mode, **options)


def agreement(logits: torch.Tensor, tokens: torch.Tensor, rank: int = 1, slack: float = 0.05) -> float:
    """Return the share of `tokens` that are among the `rank` best of eager `logits`, or within `slack` of the largest of these.

    So that generated tokens agree although a near tie falls otherwise.
    """
    logits = logits.float()
    least = logits.topk(rank, -1).values[..., -1:] - slack * logits.abs().amax(-1, keepdim=True)
    return (logits.gather(-1, tokens[..., None]) >= least).float().mean().item()


def joined() -> tuple[int, int]:
    """Join the process group that torchrun makes, each process with a GPU of its own; return rank and number of processes."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=2))
    return dist.get_rank(), dist.get_world_size()


def run(main: Callable[[str, int, bool], dict[str, Any]], description: str | None) -> None:
    """Run an example as its command line asks, and print its result."""
    command = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "--mode", choices=MODES, default="default", help="of torch.compile; none: without it"
    )
    command.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    command.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = command.parse_args()
    _quieten()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    result = main(options.mode, options.steps, options.tiny)
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT", json.dumps({**result, **_machine()}), flush=True)
        if file := os.environ.get(_TURN):
            Path(f"{file}.timed").touch()
    if dist.is_initialized():
        # CUDA graphs that hold the group's collectives have to go before it.
        torch.compiler.reset()
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def _quieten() -> None:
    warnings.filterwarnings("ignore")
    for name in ("transformers", "lightning.pytorch", "lightning.fabric", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _wait_for_turn() -> None:
    """Say that this program has compiled, and wait until those beside it have and none is timed."""
    if file := os.environ.get(_TURN):
        _wait()
        Path(f"{file}.ready").touch()
        end = time.monotonic() + _LONGEST_TURN_S
        while not Path(f"{file}.go").exists():
            if time.monotonic() > end:
                raise SystemExit("it has not become this program's turn")
            time.sleep(0.05)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _machine() -> dict[str, Any]:
    if DEVICE == "cpu":
        return {"torch": torch.__version__, "gpu": None}
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(),
        "reserved_mb": torch.cuda.max_memory_reserved() >> 20,
        "allocated_mb": torch.cuda.max_memory_allocated() >> 20,
    }
