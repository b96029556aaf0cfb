"""Computes digests of memory and of tensors on their device, by which two values are found to differ in any bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.recording.comparison import PIECE_BYTES, bits, form, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = 1024
"""64-bit words in a row of a checksum."""
MIN_ROWS, MAX_ROWS = 512, 4096
"""Rows of which the sums are taken at once, 4 to 32 MiB: PyTorch takes twice as much memory for the sums of the columns."""
PIECES = 256
"""The target for the number of pieces: a piece grows from `MIN_ROWS` to `MAX_ROWS` rows to stay within it."""
MAX_ROW_SUMS = 8 * COLUMNS
"""Sums of rows of which there is a checksum if there are more, so that a digest stays small."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The form and the checksum of a tensor whose memory is released."""

    form: tuple[Any, ...] | None
    """See `comparison.form`."""
    checksum: torch.Tensor | None
    """None: its values mean nothing."""


def checksum(memory: torch.Tensor) -> torch.Tensor:
    """Return numbers that differ if one of the given bytes differs or two words have changed places, and nearly always if more have.

    They are the sums of the rows of words and those of the columns, and the bytes around the rows. Words that change places within a row
    change the sums of two columns, all others those of two rows.
    """
    begin = min(-memory.data_ptr() % 8, memory.numel())
    end = begin + (memory.numel() - begin) // (8 * COLUMNS) * 8 * COLUMNS
    around = [memory[:begin].long(), memory[end:].long()]
    if begin == end:
        return torch.cat(around)
    # Sums of integers wrap around, and are the same in any order of adding.
    rows = memory[begin:end].view(torch.int64).view(-1, COLUMNS)
    step = min(max(MIN_ROWS, -(-len(rows) // PIECES)), MAX_ROWS)
    of_rows, of_columns = rows.new_empty(len(rows)), rows.new_empty(-(-len(rows) // step), COLUMNS)
    # Two launches a piece: a model has hundreds of inputs, and the host's time is most of it.
    for place, piece, sums in zip(of_columns, rows.split(step), of_rows.split(step), strict=True):
        torch.sum(piece, 0, out=place)
        torch.sum(piece, 1, out=sums)
    if len(rows) > MAX_ROW_SUMS:
        of_rows = checksum(of_rows.view(torch.uint8))
    return torch.cat([of_rows, of_columns.sum(0), *around])


def digest_of(tensor: torch.Tensor) -> Digest:
    """Return the digest of a tensor's elements, in the order of their memory. Takes 64 MiB of memory if there are gaps between them."""
    words = bits(tensor.detach())
    # In the order of their memory, transposed and channels-last tensors need no copy.
    words = words.permute(sorted(range(words.dim()), key=words.stride, reverse=True))
    if words.is_contiguous():
        return Digest(form(tensor), checksum(words.reshape(-1).view(torch.uint8)))
    dim = max(range(words.dim()), key=words.size)
    length = max(1, PIECE_BYTES * words.size(dim) // (words.numel() * words.element_size()))
    sums = [checksum(each.contiguous().view(-1).view(torch.uint8)) for each in words.split(length, dim)]
    return Digest(form(tensor), torch.cat(sums))


def unequal(digests: Mapping[int, Digest], values: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the digests that are not those of the values of the same form at these indices. Waits for the device."""
    found, asked = set[int](), dict[int, torch.Tensor]()
    for index, digest in digests.items():
        if digest.checksum is not None:
            other = digest_of(values[index]).checksum
            assert other is not None
            if other.size() == digest.checksum.size():
                asked[index] = torch.ne(other, digest.checksum).any()
            else:
                found.add(index)  # their memory begins at another offset in a word
    answers = zip(asked, read([*asked.values()]), strict=True)
    return frozenset(found.union(index for index, differs in answers if differs))
