"""Rows that are nearly the same: MinHash over runs of words finds the pairs, their true similarity decides.

MinHash is Broder's (1997), the bands are those of Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

SHINGLE = 5
BANDS, PER_BAND = 21, 6
"""Of pairs with a similarity of 0.8 these find 99.8 %, of those with 0.5 a quarter, which is then looked at in vain."""
WIDEST = 50
"""Rows that share a band are compared with so many of the first of them."""


def shingles(words: Sequence[bytes]) -> list[bytes]:
    return [b" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1))]


def bands(texts: Sequence[Sequence[bytes]]) -> NDArray[np.uint64]:
    """One row of `BANDS` numbers for each text, given as words."""
    from rensa import RMinHash

    if not texts:
        return np.empty((0, BANDS), np.uint64)
    matrix = RMinHash.digest_matrix_from_token_sets([shingles(text) for text in texts], BANDS * PER_BAND, 1)
    parts = np.array(matrix.to_rows(), np.uint64).reshape(len(texts), BANDS, PER_BAND)
    found = np.zeros(parts.shape[:2], np.uint64)
    for column in range(PER_BAND):
        found = (found ^ parts[:, :, column]) * np.uint64(0x9E3779B97F4A7C15)
    return found


def pairs(banded: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Each pair (earlier, later) of rows that share a band, once or more."""
    for band in range(banded.shape[1]):
        order = np.argsort(banded[:, band], kind="stable")
        sorted_ = banded[order, band]
        starts = np.flatnonzero(np.r_[True, sorted_[1:] != sorted_[:-1]])
        ends = np.r_[starts[1:], len(order)]
        for start, end in zip(starts[ends - starts > 1], ends[ends - starts > 1], strict=True):
            members = order[start:end].tolist()
            for place in range(1, len(members)):
                for other in members[: min(place, WIDEST)]:
                    yield other, members[place]


def jaccard(one: Iterable[bytes], other: Iterable[bytes]) -> float:
    first, second = set(one), set(other)
    return len(first & second) / len(first | second)
