"""Contamination: a run of 13 words of an evaluation question within a training row.

The length is that of GPT-3's analysis (arXiv 2005.14165, appendix C). In Chinese, Japanese and Korean, where words are
not divided, each character counts as one.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

N = 13
RUN = (N + 1) // 2
"""Where words are cut into runs of so many, any 13 in a row hold a whole run."""
HINT_BITS = 23
"""The first bits of a run's number say at once, for most that are not known, that they are not."""
AT_ONCE = 1000
"""So many rows are looked at in the processor's cache."""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD_OR_CHARACTER = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_ASCII = bytes(ord(chr(code).lower()) if chr(code).isalnum() else ord(" ") for code in range(128)) + bytes(128)
_HEADS = np.array([2 ** (8 * length) - 1 for length in range(9)], np.uint64)
"""By the length of a word, up to 8: what of the 8 bytes where it starts is its own."""
_HINT = np.uint64(64 - HINT_BITS)
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, place, 2**64) for place in range(1, RUN + 1)], np.uint64)


def words(text: str) -> list[bytes]:
    """The words of a text in UTF-8, without a difference of case."""
    return _spaced(text).split()


class Grams:
    """The 13-grams of texts. Most rows have none of their runs, which is found out for many rows at once."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._owners: dict[int, int] = {}
        for number, text in enumerate(texts):
            for gram in _grams(text):
                self._owners.setdefault(_digest(gram), number)
        heads, _ = _heads([_spaced(text) for text in texts])
        runs = _numbered(sliding_window_view(heads, RUN)) if self._owners else np.empty(0, np.uint64)
        self._runs: set[int] = set(runs.tolist())
        self._hints = np.zeros(1 << HINT_BITS, bool)
        self._hints[runs >> _HINT] = True

    def find(self, rows: Sequence[str]) -> Iterator[tuple[int, tuple[int, str]]]:
        """The place of each row that shares a 13-gram, with the first text that has it, and that gram."""
        for start in range(0, len(rows) if self._owners else 0, AT_ONCE):
            for place in self._likely(rows[start : start + AT_ONCE]):
                for gram in _grams(rows[start + place]):
                    if (owner := self._owners.get(_digest(gram))) is not None:
                        yield start + place, (owner, gram.decode())
                        break

    def _likely(self, rows: Sequence[str]) -> list[int]:
        """The rows that share a run, and a few that do not: runs are told by the first 8 bytes of each word."""
        spaced = [_spaced(row) for row in rows]
        heads, starts = _heads(spaced)
        whole = len(heads) // RUN * RUN
        runs = _numbered(heads[:whole].reshape(-1, RUN))
        hinted = np.flatnonzero(self._hints[runs >> _HINT])
        known = map(self._runs.__contains__, runs[hinted].tolist())
        at = starts[:whole:RUN][hinted[np.fromiter(known, bool)]]
        ends = np.cumsum([len(row) + 1 for row in spaced])
        found: list[int] = np.unique(np.searchsorted(ends, at, "right")).tolist()
        return found


def _spaced(text: str) -> bytes:
    """The words of a text with spaces between them."""
    if text.isascii():
        return text.encode().translate(_ASCII)
    return " ".join(_WORD_OR_CHARACTER.findall(text.casefold())).encode()


def _grams(text: str) -> Iterator[bytes]:
    told = words(text)
    return (b" ".join(told[start : start + N]) for start in range(len(told) - N + 1))


def _digest(gram: bytes) -> int:
    return xxhash.xxh3_64_intdigest(gram)


def _heads(texts: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """The first 8 bytes of each word of the texts, all in a row, and where in them it starts."""
    content = b" ".join([b"", *texts, b" " * 8])
    edges = np.flatnonzero(np.diff(np.frombuffer(content, np.uint8) != ord(" ")))
    starts, ends = edges.reshape(-1, 2).T
    eights: NDArray[np.uint64] = np.ndarray(len(content) - 8, "<u8", content, offset=1, strides=(1,))
    return eights[starts] & _HEADS[np.minimum(ends - starts, 8)], starts


def _numbered(runs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return runs @ _FACTORS
