"""The function that `import torch` calls in every process with PyGraph installed (entry-point group `torch.backends`).

With `PYGRAPH` unset it returns at once. It may never raise: PyTorch would turn that into a failed `import torch`.
"""

from __future__ import annotations

import contextlib
import os

_OFF = frozenset({"", "0", "off", "false", "no"})


def autoload() -> None:
    """Install the hook if `PYGRAPH` asks for it; otherwise do nothing."""
    if os.environ.get("PYGRAPH", "").lower() in _OFF:
        return
    try:
        from pygraphd.client import hook

        hook.enable(torch_is_new=True)
    except Exception as error:  # noqa: BLE001 - see the module's text
        with contextlib.suppress(Exception):
            from pygraphd.client.common import log

            log.say(f"not enabled: {type(error).__name__}: {error}")
