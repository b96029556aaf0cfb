"""The doors: `enable()` and `disable()`, and the backend "pygraph". Installs into Inductor and does little else.

Whatever goes wrong in here is counted and left to PyTorch; nothing of ours may reach the user's stack. The state of a
process is one `Session`, made when the hook is first enabled.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from pygraphd.client.common import log, report
from pygraphd.client.common.guard import guarded
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.post_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pygraphd.client.backend.torch_private import Cudagraphify, Runnable
    from pygraphd.client.dispatch.compiled_graph import Plan
    from pygraphd.client.frontend.runtime import Session

_COMPILE_FX = "torch._inductor.compile_fx"


class Hook:
    """The hook of one process: off, on for all that is compiled, or on for what backend "pygraph" compiles."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.everything = False
        self._uninstall: Callable[[], None] | None = None
        self._forget_import: Callable[[], None] | None = None
        self._remove_pass: Callable[[], None] | None = None
        self._split_no_more: Callable[[], None] | None = None
        self._local = threading.local()
        self._boxes: dict[int, Any] = {}

    # --- on and off ---

    def enable(self, *, everything: bool = True) -> None:
        """Install the hook, now if Inductor is imported, else as soon as it is; not at all if that is forbidden."""
        if settings.is_disabled(os.environ):
            return
        self.everything |= everything
        if self._forget_import is None:
            report.claim_summary()
            with self._guard("installing"):
                self._forget_import = when_imported(_COMPILE_FX, self._install)
        else:
            self._add_pass()  # so far there was backend "pygraph" alone

    def disable(self) -> None:
        """Take the hook out and end the session, recording what it knows."""
        steps = (
            self._forget_import,
            self._uninstall,
            self._remove_pass,
            self._split_no_more,
            self._forget_what_was_sent,
        )
        for step in steps:
            if step is not None:
                with self._guard("disabling"):
                    step()
        self.close()
        self.session = None
        self.everything = False
        self._uninstall = None
        self._forget_import = None
        self._remove_pass = None
        self._split_no_more = None
        self._boxes.clear()

    def _forget_what_was_sent(self) -> None:
        """Give back what the rules of placement keep on GPUs; what they have compiled sends it again."""
        upload = sys.modules.get("pygraphd.client.placement.upload")
        if upload is not None:
            upload.sender.clear()

    def close(self) -> None:
        """End the session: record what is left, write the summary. Never raises."""
        session = self.session
        if self._forget_import is None or (session is not None and session.pid != os.getpid()):
            return
        try:
            if session is not None:
                session.close()
            report.write_summary(session.report if session is not None else report.Report())
        except Exception as error:  # noqa: BLE001
            log.say(f"the summary is not complete: {error}")

    def _install(self) -> None:
        with self._guard("installing"):
            from pygraphd.client.backend import torch_private
            from pygraphd.client.decisions import daemon_start
            from pygraphd.client.decisions.transport import Transport
            from pygraphd.client.frontend.runtime import Session

            if reason := torch_private.missing():
                log.say(f"not enabled: {reason}")
                return
            self.session = Session()
            if misread := self.session.options.misread:
                log.say("; ".join(misread), is_logged=True)
            self._uninstall = torch_private.install(self._around_post_compile, self._around_cudagraphify)
            # A daemon makes a database, and takes in the spool.
            forbidden = f"{settings.READONLY}={os.environ.get(settings.READONLY)}"
            transport = Transport(self.session.locations.socket)
            readonly = self.session.options.readonly
            if reason := daemon_start.ensure(transport, forbidden=forbidden if readonly else None):
                self.session.report.count_failure(f"daemon: {reason}")
            if torch_private.cuda_is_set_up():  # else there may be nothing to relocate
                self.session.prepare_helper()
        with self._guard("splitting graphs"):
            self._split()
        with self._guard("adding a pass"):
            self._add_pass()

    def _split(self) -> None:
        """Have graphs be split around operators that run at each call, in modes in which Inductor does not."""
        from pygraphd.client.backend import torch_private

        session = self.session
        if session is None or not session.options.relocate or torch_private.missing_for_passes():
            return
        if reason := torch_private.missing_for_partitions():
            session.report.count_failure(f"custom operators: {reason}")
            return
        self._split_no_more = torch_private.split_graphs(session.options.graph_ops)

    # --- before a compilation ---

    def _add_pass(self) -> None:
        """Have the rules of placement be applied to all that is compiled, if that is wanted."""
        if self.everything and self._remove_pass is None and self._places():
            from pygraphd.client.backend import torch_private

            with self._guard("adding a pass"):
                self._remove_pass = torch_private.add_pass(*self._placement())

    def with_placement(self, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return Inductor's options for what backend "pygraph" compiles, with the rules of placement if these are wanted."""
        given = dict(options or {})
        if self._places():
            from pygraphd.client.backend import torch_private

            with self._guard("adding a pass"):
                before = given.get(torch_private.PASS_OPTION, torch_private.current_pass())
                if self._remove_pass is None or not torch_private.is_added(before):
                    given[torch_private.PASS_OPTION] = torch_private.pass_after(before, *self._placement())
        return given

    def _places(self) -> bool:
        session = self.session
        if session is None or not session.options.placement:
            return False
        from pygraphd.client.backend import torch_private

        if reason := torch_private.missing_for_passes():
            session.report.count_failure(f"placement: {reason}")
        return reason is None

    def _placement(self) -> tuple[Callable[[Any], None], tuple[str, ...]]:
        from pygraphd.client.placement.pipeline import FILES, Placement

        return Placement(lambda: self.session.report if self.session is not None else None), FILES

    def _tell_placement(self, compiled: Any) -> None:
        """Have the report say what the rules did to a graph, whoever has compiled it."""
        session = self._session_here()
        upload = sys.modules.get("pygraphd.client.placement.upload")
        if session is None or upload is None:
            return  # there are no rules
        from pygraphd.client.placement import provenance

        with self._guard("telling of placement"):
            if session.options.placement and not provenance.passes_ran(compiled):
                session.report.count_failure(provenance.NOT_APPLIED)
            provenance.report_results(compiled, session.report, upload.sender.set_source_lines)

    # --- within a compilation ---

    def _around_post_compile(
        self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]
    ) -> None:
        if self._ours(graph_kwargs):
            self._tell_placement(compiled)
        plan = self._plan(compiled, graph_kwargs)
        outer, self._local.plan = getattr(self._local, "plan", None), plan
        try:
            original()
        finally:
            self._local.plan = outer
        if plan is not None:
            with self._guard("completing a plan"):
                plan.complete(compiled)

    def _around_cudagraphify(
        self, original: Cudagraphify, runnable: Runnable, kwargs: Mapping[str, Any]
    ) -> Runnable:
        plan: Plan | None = getattr(self._local, "plan", None)
        if plan is not None:
            with self._guard("wrapping a partition"):
                return plan.cudagraphify(runnable, kwargs)
            return runnable  # the others of its graph are ours, and PyTorch's trees are to see all or none
        return original(runnable, **kwargs)

    def _plan(self, compiled: Any, graph_kwargs: Mapping[str, Any]) -> Plan | None:
        session = self._session_here()
        if session is None or not self._ours(graph_kwargs):
            return None
        with self._guard("planning"):
            return session.plan(compiled, graph_kwargs)
        return None

    def _session_here(self) -> Session | None:
        """Return the session, a new one in a forked child."""
        if self.session is not None and self.session.pid != os.getpid():
            from pygraphd.client.frontend.runtime import Session

            self.session = Session()
        return self.session

    def _ours(self, graph_kwargs: Mapping[str, Any]) -> bool:
        # A forward and its backward share a box, even if the backward is compiled much later.
        box = graph_kwargs.get("boxed_forward_device_index")
        if getattr(self._local, "in_backend", False):
            self._boxes[id(box)] = box  # kept alive, so that its id stays its own
            return True
        return self.everything or (box is not None and id(box) in self._boxes)

    @contextlib.contextmanager
    def in_backend(self) -> Iterator[None]:
        """Mark what is compiled within as compiled by backend "pygraph"."""
        outer, self._local.in_backend = getattr(self._local, "in_backend", False), True
        try:
            yield
        finally:
            self._local.in_backend = outer

    def _guard(self, what: str) -> guarded:
        return guarded(self.session.report if self.session is not None else None, what, in_full=True)


_hook = Hook()
atexit.register(lambda: _hook.close())


def enable() -> None:
    """Have PyGraph decide how every graph runs that is compiled from now on, in this process; see `pygraphd.enable`."""
    _hook.enable()


def disable() -> None:
    """Leave what is compiled from now on to PyTorch; see `pygraphd.disable`."""
    _hook.disable()


def backend(
    graph: Any, example_inputs: Any, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Compile as backend "inductor" does, with PyGraph deciding how each graph runs: `torch.compile(backend="pygraph")`."""
    from pygraphd.client.backend import torch_private

    _hook.enable(everything=False)
    importlib.import_module(_COMPILE_FX)  # the hook waits for it; later, the first graph has no rules
    with _hook.in_backend():
        options = _hook.with_placement(options)
        return torch_private.compile_with_inductor(graph, example_inputs, mode, options)
