"""The variants that are compared: plain PyTorch, and PyGraph with a cold and a warm cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from benchmarks.errors import BenchmarkError, UnknownNameError


class Compile(enum.StrEnum):
    """How the child process compiles the module."""

    EAGER = "eager"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    CUDA_GRAPH = "cuda-graph"
    """As by default, and the whole step is recorded by hand in one CUDA graph."""

    @property
    def mode(self) -> Compile:
        """The mode of `torch.compile`; processes of one mode can share what was compiled."""
        return Compile.DEFAULT if self is Compile.CUDA_GRAPH else self


class Cache(enum.StrEnum):
    """The state of the daemon's cache when the process starts."""

    NONE = "none"
    """No daemon and no hook: the product takes no part."""
    COLD = "cold"
    """A daemon with an empty database, a new one for each repetition."""
    WARM = "warm"
    """A daemon whose database an unmeasured process has filled with the same workload."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One column of the comparison."""

    name: str
    compile: Compile
    cache: Cache
    summary: str
    filled_by: str = ""
    """Of a variant with a warm cache: the variant with an empty cache that fills it, and has to run before."""

    @property
    def is_ours(self) -> bool:
        """Whether PyGraph takes part."""
        return self.cache is not Cache.NONE


_VARIANTS = (
    Variant("eager", Compile.EAGER, Cache.NONE, "not compiled"),
    Variant("default", Compile.DEFAULT, Cache.NONE, "torch.compile(module)"),
    Variant(
        "reduce-overhead",
        Compile.REDUCE_OVERHEAD,
        Cache.NONE,
        'torch.compile(module, mode="reduce-overhead")',
    ),
    Variant("pygraph-cold", Compile.REDUCE_OVERHEAD, Cache.COLD, "the same under PYGRAPH=1, empty cache"),
    Variant(
        "pygraph-warm",
        Compile.REDUCE_OVERHEAD,
        Cache.WARM,
        "the same under PYGRAPH=1, filled cache",
        filled_by="pygraph-cold",
    ),
    Variant(
        "pygraph-default", Compile.DEFAULT, Cache.COLD, "torch.compile(module) under PYGRAPH=1, empty cache"
    ),
    Variant(
        "pygraph-default-warm",
        Compile.DEFAULT,
        Cache.WARM,
        "torch.compile(module) under PYGRAPH=1, filled cache",
        filled_by="pygraph-default",
    ),
    # With one process for each variant, as in a suite, nothing else shows the noise.
    Variant("default-again", Compile.DEFAULT, Cache.NONE, "default a second time, which shows the noise"),
    Variant("cuda-graph", Compile.CUDA_GRAPH, Cache.NONE, "default, recorded by hand in one CUDA graph"),
)
VARIANTS = {variant.name: variant for variant in _VARIANTS}
OURS = tuple(variant.name for variant in _VARIANTS if variant.is_ours)


def select_variants(names: list[str]) -> tuple[Variant, ...]:
    """Return the variants of these names, in this order; raises UnknownNameError."""
    if unknown := [name for name in names if name not in VARIANTS]:
        raise UnknownNameError("variant", unknown, list(VARIANTS))
    return tuple(VARIANTS[name] for name in dict.fromkeys(names))


def variants_to_run(names: list[str]) -> tuple[Variant, ...]:
    """Return variants that can be run in this order; raises BenchmarkError if no variant fills the cache of a warm one."""
    variants = select_variants(names)
    for number, each in enumerate(variants):
        if each.filled_by and VARIANTS[each.filled_by] not in variants[:number]:
            raise BenchmarkError(
                f"{each.name} needs a cache that {each.filled_by} fills: name that before it"
            )
    return variants
