"""What `make demo` runs: the quick start twice through PyGraph, in two processes, beside a daemon of its own.

It checks its promise: the second run must find every graph in the cache and measure nothing. Everything it makes lies
in `.demo/` beside the Makefile, emptied at each start, or in a new folder that is named (`demo.py FOLDER`), so that several
can run side by side; the daemon is stopped however the demo ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
OWN_FOLDER = REPOSITORY / ".demo"
FOLDER = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else OWN_FOLDER
QUICKSTART = REPOSITORY / "examples" / "quickstart.py"
PYGRAPHD = [
    sys.executable,
    "-P",
    "-m",
    "pygraphd",
]  # the command may lie elsewhere: `pip install --target` puts it aside
STOP_TIMEOUT_S = 30
NOT_RUNNING = 3

Summary = dict[str, Any]


class DemoError(Exception):
    """The demo cannot go on, or did not show what it promises; the text says what and where to look."""


def environment() -> dict[str, str]:
    """Return the environment of everything the demo starts: all caches in its own folder, no auto-start, no decisions that the package brings."""
    return {
        **os.environ,
        "PYGRAPHD_HOME": str(FOLDER / "home"),
        "PYGRAPHD_AUTOSTART": "0",
        "PYGRAPHD_SHIPPED": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
        "TRITON_CACHE_DIR": str(FOLDER / "triton"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }


def daemon(*arguments: str) -> None:
    """Run one `pygraphd` command with its output on the terminal."""
    finished = subprocess.run([*PYGRAPHD, *arguments], env=environment(), check=False)
    if finished.returncode != 0:
        raise DemoError(f"pygraphd {' '.join(arguments)} ended with exit code {finished.returncode}")


def stop_daemon() -> None:
    """Stop the demo's daemon and wait until it is gone; one that is not running is no error."""
    finished = subprocess.run(
        [*PYGRAPHD, "stop"],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=STOP_TIMEOUT_S,
    )
    if finished.returncode not in (0, NOT_RUNNING):
        raise DemoError(f"the daemon could not be stopped: {finished.stderr.strip()}")


def empty_folder() -> None:
    """Begin from nothing, also after a demo that was killed and left its daemon behind."""
    if FOLDER.exists():
        if FOLDER != OWN_FOLDER:
            raise DemoError(f"{FOLDER} exists, and a demo would empty it: name a folder that does not")
        stop_daemon()
        shutil.rmtree(FOLDER)
    FOLDER.mkdir(parents=True)


def run_quickstart(name: str) -> Summary:
    """Run the quick start in a process of its own and return what PyGraph says about it."""
    path = FOLDER / f"{name}.json"
    variables = {**environment(), "PYGRAPH": "1", "PYGRAPH_SUMMARY": str(path)}
    finished = subprocess.run([sys.executable, QUICKSTART], env=variables, check=False)
    if finished.returncode != 0:
        raise DemoError(f"{QUICKSTART.name} ended with exit code {finished.returncode}")
    if not path.exists():
        raise DemoError(f"{QUICKSTART.name} ended without a summary: PyGraph was not active in it")
    summary: Summary = json.loads(path.read_text())
    return summary


def describe(summary: Summary) -> str:
    """Return what was looked up, hit, measured and deployed, as indented lines."""
    counts = ", ".join(
        f"{summary[name]} {label}"
        for name, label in (("looked_up", "looked up"), ("hits", "hit"), ("measured", "measured"))
    )
    deployed = ", ".join(f"{count} {name}" for name, count in summary["deployed"].items() if count)
    reasons = [f"    {count} x {text}" for text, count in summary["reasons"].items()]
    times = f"{summary['lookup_ms']:.1f} ms looking up, {summary['measuring_ms']:.1f} ms measuring"
    return "\n".join(
        (f"  graphs: {summary['graphs']}: {counts} ({times})", f"  deployed: {deployed or 'none'}", *reasons)
    )


def broken_promise(first: Summary, second: Summary) -> str | None:
    """Return what the two runs did not show, or None if they did."""
    if first["graphs"] == 0:
        return "the first run had no graph"
    if first["hits"] != 0:
        return f"the first run hit {first['hits']} graphs in a cache that should have been empty"
    if second["hits"] != second["graphs"] or second["graphs"] == 0:
        return f"the second run hit {second['hits']} of its {second['graphs']} graphs, not all"
    if second["measured"] != 0:
        return f"the second run measured {second['measured']} graphs again"
    return None


def show() -> None:
    """Start the daemon, run the quick start twice, show the cache."""
    daemon("start")
    summaries = []
    for name, title in (("first", "first run: the cache is empty"), ("second", "second run: a new process")):
        print(f"\n== {title}", flush=True)
        summaries.append(run_quickstart(name))
        print(describe(summaries[-1]))
    print("\n== pygraphd cache inspect", flush=True)
    daemon("cache", "inspect")
    if problem := broken_promise(*summaries):
        raise DemoError(f"{problem}; the daemon's log is in {FOLDER / 'home'}")
    print(f"\nThe second run knew all of its {summaries[1]['graphs']} graphs and measured none.")


def _terminate(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)


def main() -> int:
    """Run the demo and return its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        empty_folder()
        try:
            show()
        finally:
            stop_daemon()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
