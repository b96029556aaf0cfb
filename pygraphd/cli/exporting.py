"""Select the entries for `cache export`: final decisions, each with the measurements that it rests on."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

from pygraphd.cli.catalogue import PAGE_ROWS
from pygraphd.daemon import portable_rows
from pygraphd.daemon.queries import chunks, row_place
from pygraphd.daemon.rederiving import NOT_VALID
from pygraphd.schema.checks import InvalidMessageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pygraphd.cli.catalogue import Catalogue
    from pygraphd.daemon.queries import Key
    from pygraphd.daemon.rederiving import Row
    from pygraphd.schema.portable import Portable

NOT_FINAL = "not final: whoever meets that graph measures it"


class Export:
    """The entries whose GPU name contains `gpu` and whose graph digest begins with `graph`, oldest first, as they are read.

    `left_out` has the number of entries left out so far, by reason.
    """

    def __init__(self, catalogue: Catalogue, gpu: str = "", graph: str = "") -> None:
        self._catalogue = catalogue
        self._places = catalogue.places(gpu, graph)
        self.left_out: Counter[str] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether no entry is selected, be it final or not."""
        return not self._places

    def __iter__(self) -> Iterator[Portable]:
        for some in chunks(self._places, PAGE_ROWS):
            rows, measured = self._catalogue.read_repeatable(
                functools.partial(portable_rows.entries, where=row_place.in_(some))
            )
            # SQLite returns them in any order, and some may have been deleted since their places were read.
            by_place = {row["place"]: row for row in rows}
            for row in (by_place[place] for place in some if place in by_place):
                if (entry := self._entry(row, measured)) is not None:
                    yield entry

    def _entry(self, row: Row, measured: Mapping[Key, Sequence[Row]]) -> Portable | None:
        if not row["final"]:
            self.left_out[NOT_FINAL] += 1
            return None
        try:
            return portable_rows.portable(row, measured.get((row["environment"], row["graph"]), []))
        except InvalidMessageError:  # another program's deployment, or a time that is none
            self.left_out[NOT_VALID] += 1
            return None
