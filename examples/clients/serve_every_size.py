"""Serves the requests of serve_batches.py without padding: a batch has as many rows as requests, 1 to 64, each of which may be recorded."""

from typing import Any

from gpt_decode import LARGE, TINY
from measuring import run
from serve_batches import MOST, serve, server


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Serve for `steps` steps."""
    sizes = TINY if tiny else LARGE
    return serve(server(sizes), mode, steps, sizes, range(1, MOST + 1))


if __name__ == "__main__":
    run(main, __doc__)
