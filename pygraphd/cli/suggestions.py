"""What a person may have meant by a command that there is none of: one of another group, too, as `pygraphd inspect` for `pygraphd cache inspect`.

typer itself looks in one group only. For options it names the close ones by itself.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


_LEAST_ALIKE = 0.65
"""Of difflib's ratio: what it takes for close by default, 0.6, has `init` beside `inspct`."""


class Commands(TyperGroup):
    """A group of commands that, for one that it lacks, names those of the whole program that are spelled alike."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that the words begin with; ends with a usage error if there is none."""
        word = args[0]
        # A word that begins with a dash is an option in the wrong place, which has an error of its own.
        # `resilient_parsing` is set while a shell completes a line, which must not end in an error.
        if not ctx.resilient_parsing and not word.startswith("-") and self.get_command(ctx, word) is None:
            meant = _alike(word, ctx)
            ctx.fail(f"No such command {word!r}." + (f" Did you mean: {', '.join(meant)}" if meant else ""))
        return super().resolve_command(ctx, args)


def _alike(word: str, ctx: Any) -> list[str]:
    """Return the commands whose last word is spelled like `word`, as one types them: those of the group in `ctx` first."""
    root = ctx.find_root()
    by_word: dict[str, list[str]] = {}
    for path in _paths(root.command, str(root.info_name)):
        by_word.setdefault(path.rpartition(" ")[2], []).append(path)
    found = [
        path
        for each in difflib.get_close_matches(word, by_word, cutoff=_LEAST_ALIKE)
        for path in by_word[each]
    ]
    return sorted(found, key=lambda path: path.rpartition(" ")[0] != ctx.command_path)


def _paths(group: Any, name: str) -> Iterator[str]:
    for word, command in group.commands.items():
        yield f"{name} {word}"
        if hasattr(command, "commands"):
            yield from _paths(command, f"{name} {word}")
