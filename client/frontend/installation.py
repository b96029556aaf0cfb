"""Installs PyGraph into Inductor, and takes it out: code that runs before, within and after each compilation.

A failure in here is counted, and the graph is left to PyTorch; no exception of PyGraph's may reach the user's program. The state of a process
is one `Runtime`, made when Inductor is first there.
"""

from __future__ import annotations

import contextlib
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
    from pygraphd.client.dispatch.compiled_graph import CompiledGraph
    from pygraphd.client.frontend.runtime import Runtime

# As in `torch_private`, whose import would import torch: `enable` may come before that.
COMPILE_FX = "torch._inductor.compile_fx"
_UPLOAD = "pygraphd.client.placement.upload"


class Hook:
    """The hook of one process: off, on for all compilations, or on for those of backend "pygraph"."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.everything = False
        self._is_enabled = False
        self._has_pass = False
        self._undo: list[Callable[[], None]] = []
        self._local = threading.local()

    # --- on and off ---

    def enable(self, *, everything: bool = True, torch_is_new: bool = False) -> None:
        """Install the hook, now if Inductor is imported, else as soon as it is; not at all if PYGRAPH_DISABLE forbids it.

        `torch_is_new`: torch is being imported, so no profiler has run yet.
        """
        if settings.is_disabled(os.environ):
            return
        self.everything |= everything
        if self._is_enabled:
            self._add_pass()  # so far there was backend "pygraph" alone
            return
        report.claim_summary()
        if "torch.autograd.profiler" in sys.modules:
            with self._guard("watching the profiler"):
                from pygraphd.client.backend import torch_private

                torch_private.watch_profiler(sees_all=torch_is_new)
        with self._guard("installing"):
            self._undo.append(when_imported(COMPILE_FX, self._install))
            self._is_enabled = True

    def disable(self) -> None:
        """Remove the hook and end the runtime, which records its results."""
        for step in [*self._undo, _forget_uploads]:
            with self._guard("disabling"):
                step()
        self.close()
        self.runtime = None
        self.everything = self._is_enabled = self._has_pass = False
        self._undo.clear()

    def close(self) -> None:
        """End the runtime: record the remaining results, and write the summary. Never raises."""
        runtime = self.runtime
        # A forked child that has compiled nothing still holds its parent's runtime, which the parent reports.
        if not self._is_enabled or (runtime is not None and runtime.pid != os.getpid()):
            return
        try:
            if runtime is not None:
                runtime.close()
            report.write_summary(runtime.report if runtime is not None else report.Report())
        except Exception as error:  # noqa: BLE001
            log.say(f"the summary is not complete: {error}")

    def _install(self) -> None:
        with self._guard("installing"):
            from pygraphd.client.backend import torch_private
            from pygraphd.client.decisions import daemon_start
            from pygraphd.client.decisions.transport import Transport
            from pygraphd.client.frontend.runtime import Runtime

            if reason := torch_private.missing():
                log.say(f"not enabled: {reason}")
                return
            runtime = self.runtime = Runtime()
            if misread := runtime.options.misread:
                log.say("; ".join(misread), is_logged=True)
            self._undo.append(torch_private.install(self._around_post_compile, self._around_cudagraphify))
            torch_private.watch_profiler(sees_all=False)
            # A daemon makes a database, and imports the spool.
            forbidden = f"{settings.READONLY}={os.environ.get(settings.READONLY)}"
            transport = Transport(runtime.locations.socket)
            is_readonly = runtime.options.readonly
            if reason := daemon_start.ensure(transport, forbidden=forbidden if is_readonly else None):
                runtime.report.count_failure(f"daemon: {reason}")
            with self._guard("adding to artifacts"):
                self._undo.append(torch_private.add_to_artifacts(self._before_saving))
        with self._guard("splitting graphs"):
            self._split()
        with self._guard("preparing collectives"):
            self._prepare_collectives()
        with self._guard("adding a pass"):
            self._add_pass()

    def _split(self) -> None:
        """Have graphs be split around operators that run at each call, in modes in which Inductor does not."""
        from pygraphd.client.backend import torch_private

        runtime = self.runtime
        if runtime is None or not runtime.options.relocate or torch_private.missing_for("passes"):
            return
        if reason := torch_private.missing_for("partitions"):
            runtime.report.count_failure(f"custom operators: {reason}")
            return
        self._undo.append(torch_private.split_graphs(runtime.options.graph_ops))

    def _prepare_collectives(self) -> None:
        """Have NCCL capture nothing that cannot move, and recordings of collectives end before their process group."""
        from pygraphd.client.backend import torch_private
        from pygraphd.client.decisions.ranks.process_group import GRAPH_REGISTER

        is_on = self.runtime is not None and self.runtime.options.collectives
        if is_on and torch_private.missing_for("groups") is None:
            if GRAPH_REGISTER not in os.environ:
                os.environ[GRAPH_REGISTER] = "0"
                self._undo.append(lambda: os.environ.__delitem__(GRAPH_REGISTER))
            self._undo.append(torch_private.before_groups_end(self._end_collectives))

    def _end_collectives(self, group: str | None) -> None:
        with self._guard("ending collectives"):
            if self.runtime is not None and self.runtime.pid == os.getpid():  # a forked child has no GPU
                self.runtime.devices.end_collectives(group)

    def _before_saving(self, add: Callable[[Mapping[str, object]], None]) -> None:
        """Have the decisions of this process be among the artifacts that the program is about to save."""
        with self._guard("adding to artifacts"):
            if (runtime := self._runtime_here()) is not None:
                add(runtime.cache.bundle.artifacts())

    # --- before a compilation ---

    def _add_pass(self) -> None:
        if self.everything and not self._has_pass and self._places():
            from pygraphd.client.backend import torch_private

            with self._guard("adding a pass"):
                self._undo.append(torch_private.add_pass(*self._placement()))
                self._has_pass = True

    def with_placement(self, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return Inductor's options for compilations of backend "pygraph", with the passes of placement if these are switched on."""
        given = dict(options or {})
        if self._places():
            from pygraphd.client.backend import torch_private

            with self._guard("adding a pass"):
                before = given.get(torch_private.PASS_OPTION, torch_private.current_pass())
                if not (self._has_pass and torch_private.is_added(before)):
                    given[torch_private.PASS_OPTION] = torch_private.pass_after(before, *self._placement())
        return given

    def _places(self) -> bool:
        runtime = self.runtime
        if runtime is None or not runtime.options.placement:
            return False
        from pygraphd.client.backend import torch_private

        if reason := torch_private.missing_for("passes"):
            runtime.report.count_failure(f"placement: {reason}")
        return reason is None

    def _placement(self) -> tuple[Callable[[Any], None], tuple[str, ...]]:
        from pygraphd.client.placement.pipeline import FILES, Placement

        return Placement(lambda: self.runtime.report if self.runtime is not None else None), FILES

    @contextlib.contextmanager
    def in_backend(self) -> Iterator[None]:
        """Mark compilations within this context as made by backend "pygraph"."""
        outer, self._local.in_backend = getattr(self._local, "in_backend", False), True
        try:
            yield
        finally:
            self._local.in_backend = outer

    # --- within a compilation ---

    def _around_post_compile(
        self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]
    ) -> None:
        graph = None
        with self._guard("planning"):
            runtime = self._runtime_here()
            if runtime is not None and self._is_ours(runtime, graph_kwargs):
                self._report_placement(runtime, compiled)
                graph = runtime.compiled_graph(compiled, graph_kwargs)
        outer, self._local.graph = getattr(self._local, "graph", None), graph
        try:
            # Outside of the guards: an error of Inductor's is for the program.
            original()
        finally:
            self._local.graph = outer
        if graph is not None:
            with self._guard("completing a plan"):
                graph.complete(compiled)

    def _around_cudagraphify(
        self, original: Cudagraphify, runnable: Runnable, kwargs: Mapping[str, Any]
    ) -> Runnable:
        graph: CompiledGraph | None = getattr(self._local, "graph", None)
        if graph is not None:
            with self._guard("wrapping a partition"):
                return graph.cudagraphify(runnable, kwargs)
            return runnable  # PyGraph runs the other partitions, and PyTorch's trees have to see all of a graph or none
        return original(runnable, **kwargs)

    def _runtime_here(self) -> Runtime | None:
        """Return the runtime, a new one in a forked child."""
        parent = self.runtime
        if parent is not None and parent.pid != os.getpid():
            from pygraphd.client.frontend.runtime import Runtime

            self.runtime = Runtime()
            self.runtime.adopt_pairs(parent)
        return self.runtime

    def _is_ours(self, runtime: Runtime, graph_kwargs: Mapping[str, Any]) -> bool:
        # A forward and its backward share a box, even if the backward is compiled much later.
        box = graph_kwargs.get("boxed_forward_device_index")
        if getattr(self._local, "in_backend", False):
            runtime.pair(box)
            return True
        return self.everything or runtime.has_pair(box)

    def _report_placement(self, runtime: Runtime, compiled: Any) -> None:
        """Report the results of the placement passes for a graph, also if another process compiled it."""
        if _UPLOAD not in sys.modules:
            return  # there are no passes
        from pygraphd.client.placement import provenance

        with self._guard("reporting placement"):
            provenance.report_results(compiled, runtime.report, expected=runtime.options.placement)

    def _guard(self, what: str) -> guarded:
        return guarded(self.runtime.report if self.runtime is not None else None, what, in_full=True)


def _forget_uploads() -> None:
    """Release the copies that placement keeps on GPUs; graphs that use them upload them again."""
    if (upload := sys.modules.get(_UPLOAD)) is not None:
        upload.sender.clear()
