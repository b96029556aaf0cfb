"""Runs a program once a rank, in forks. Arguments: the program, ranks, a folder.

PyTorch is imported after the fork, so to whatever comes with that import each rank is a process of its own. The program's
arguments are the rank, the ranks and a file to meet at. What it prints is in the folder, in `out.RANK`, and what PyGraph
writes at its end in `summary.RANK`. The first rank that fails ends the others.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def run_rank(program: str, rank: int, world: int, folder: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(folder / f"out.{rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.environ["PYGRAPH_SUMMARY"] = str(folder / f"summary.{rank}")
    sys.argv = [program, str(rank), str(world), str(folder / "meeting")]
    runpy.run_path(program, run_name="__main__")


def wait_for(ranks: set[int]) -> None:
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")


def main() -> None:
    program, world, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    ranks = set()
    for rank in range(world):
        process = os.fork()
        if process == 0:
            run_rank(program, rank, world, folder)
            return
        ranks.add(process)
    wait_for(ranks)


if __name__ == "__main__":
    main()
