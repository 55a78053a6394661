"""All rows of a mix as numbers: which of them go and why, and which are drawn."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from gradeflow.mixing import near, scan, written
from gradeflow.mixing.grams import Grams, words
from gradeflow.mixing.parallel import each
from gradeflow.mixing.quota import quotas, shares
from gradeflow.mixing.scan import SPLITS, TYPES, Raw
from gradeflow.mixing.written import Gone, Why
from gradeflow.params import Mix
from gradeflow.types import Split

WHY: tuple[Why, ...] = ("duplicate", "contaminated", "near duplicate")
AT_ONCE = 10_000


class Pool:
    """Rows in the order in which the first of equal ones is kept: held-out ones first, then by source and place."""

    def __init__(self, raws: Sequence[Raw], settings: Mix, progress: Progress) -> None:
        self._raws = raws
        self._settings = settings
        self._progress = progress
        with_bands = settings.near_duplicates > 0
        pieces = scan.pieces(raws)
        held = list(each(scan.held_out, pieces, with_bands, progress, "mix  held-out questions"))
        questions = [question for one in held for question in one.questions] if settings.decontaminate else []
        entries = np.concatenate([one.entries for one in held])
        order = np.lexsort((entries["offset"], entries["source"], entries["split"]))
        mixed = [piece for piece in pieces if piece.raw.is_mixed]
        shared = Grams(questions), with_bands
        found = list(each(scan.training, mixed, shared, progress, "mix  training questions"))  # by source and place
        starts = np.cumsum([len(order), *(len(one.entries) for one in found)]).tolist()
        now = np.argsort(order)
        leaks = [
            (start + place, int(now[question]), words_shared)
            for start, one in zip(starts, found, strict=False)
            for place, (question, words_shared) in one.leaks.items()
        ]
        bands = np.concatenate([one.bands for one in (*held, *found)])
        self.entries: NDArray[Any] = np.concatenate([entries[order], *(one.entries for one in found)])
        del found  # of many rows they take as much room as all that follows
        self._why = np.zeros(len(self.entries), np.uint8)  # 1 and on: what WHY has there
        self._because = np.full(len(self.entries), -1, np.int64)
        self._shared: dict[int, str | float] = {}
        self._drop_duplicates()
        self._drop_contaminated(leaks)
        if with_bands:
            bands[: len(order)] = bands[order]
            self._drop_near_duplicates(bands)

    def left(self, split: Split) -> NDArray[np.int64]:
        """The entries of a split that are not removed, by their index."""
        return np.flatnonzero((self.entries["split"] == SPLITS.index(split)) & (self._why == 0))

    def count(self, indices: NDArray[np.int64]) -> dict[str, dict[str, int]]:
        """How many of these entries there are, by problem type and source."""
        rows, found = self.entries[indices], dict[str, dict[str, int]]()
        for raw in self._raws:
            kinds, counts = np.unique(rows["type"][rows["source"] == raw.number], return_counts=True)
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                found.setdefault(TYPES[kind], {})[raw.name] = count
        return found

    def removed(self) -> dict[Split, dict[Why, int]]:
        """How many rows each split has lost, and why."""
        return {
            split: {
                why: int(np.sum((self.entries["split"] == SPLITS.index(split)) & (self._why == number)))
                for number, why in enumerate(WHY, start=1)
            }
            for split in SPLITS
        }

    def removals(self) -> Iterator[str]:
        """The rows that go, and why, in lines of JSON."""
        gone = np.flatnonzero(self._why)
        blocks = [
            Gone(
                self.entries[some],
                self.entries[self._because[some]],
                [WHY[number - 1] for number in self._why[some].tolist()],
                [self._shared.get(index, "") for index in some.tolist()],
            )
            for some in (gone[start : start + AT_ONCE] for start in range(0, len(gone), AT_ONCE))
        ]
        yield from each(written.removed, blocks, self._raws, self._progress, "mix  removed rows")

    def draw(self, split: Split, size: int) -> NDArray[np.int64]:
        """About `size` entries, by their index: exact shares of types and of sources, in an order that mixes them.

        A row is drawn by the digest of its problem and the seed: where some rows come or go, others stay.
        """
        settings = self._settings
        left = self.left(split)
        left = left[np.isin(self.entries["source"][left], [raw.number for raw in self._raws if raw.is_mixed])]
        there = self.count(left)
        ratios = {str(kind): ratio for kind, ratio in settings.type_ratios.items() if kind in there}
        keep_below = settings.keep_small_threshold if split == "train" else 0
        repeats = settings.repeat if split == "train" else 1
        drawn = [np.empty(0, np.int64)]
        for kind, total in shares(ratios, size).items() if ratios else ():
            small = {name for name, count in there[kind].items() if count < keep_below}
            most = {
                name: min(count if name in small else repeats * count, settings.caps.get(name, size))
                for name, count in there[kind].items()
            }
            for name, count in quotas(most, settings.weights, total, small).items():
                drawn.append(self._some(split, kind, name, count))
        chosen = np.concatenate(drawn)
        return chosen[np.argsort(_mixed(self.entries["low"][chosen], settings.seed), kind="stable")]

    def _some(self, split: Split, kind: str, name: str, count: int) -> NDArray[np.int64]:
        number = next(raw.number for raw in self._raws if raw.name == name)
        entries = self.entries
        rows = np.flatnonzero(
            (entries["split"] == SPLITS.index(split))
            & (entries["source"] == number)
            & (entries["type"] == [str(each) for each in TYPES].index(kind))
            & (self._why == 0)
        )
        rows = rows[np.argsort(_mixed(entries["high"][rows], self._settings.seed), kind="stable")]
        return np.resize(rows, count)

    def _drop_duplicates(self) -> None:
        order = np.lexsort((self.entries["low"], self.entries["high"]))  # stable: the first of equal ones stays first
        new = np.ones(len(order), bool)
        new[1:] = np.logical_or.reduce([np.diff(self.entries[half][order]) != 0 for half in ("high", "low")])
        first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        self._why[order[~new]] = 1 + WHY.index("duplicate")
        self._because[order[~new]] = first[~new]

    def _drop_contaminated(self, leaks: Sequence[tuple[int, int, str]]) -> None:
        """`leaks` are a row, the question that it gives away, and the words that they share."""
        for index, question, shared in leaks:
            if not self._why[index]:
                self._note(index, "contaminated", question, shared)

    def _drop_near_duplicates(self, bands: NDArray[np.uint64]) -> None:
        made = [raw.number for raw in self._raws if raw.is_made]
        kept = np.flatnonzero((self._why == 0) & ~np.isin(self.entries["source"], made))
        candidates = np.array(sorted(set(near.pairs(bands[kept]))), np.int64).reshape(-1, 2)
        candidates = kept[candidates[np.argsort(candidates[:, 1], kind="stable")]]
        for start in self._progress.track(range(0, len(candidates), AT_ONCE), description="mix  near duplicates"):
            some = candidates[start : start + AT_ONCE]
            indices = np.unique(some)
            examples = scan.read(self._raws, self.entries[indices])
            told = {
                index: near.shingles(words(example.problem))
                for index, example in zip(indices.tolist(), examples, strict=True)
            }
            for earlier, later in some.tolist():
                if self._why[earlier] or self._why[later]:
                    continue
                similar = near.jaccard(told[earlier], told[later])
                if similar >= self._settings.near_duplicates:
                    self._note(later, "near duplicate", earlier, round(similar, 3))

    def _note(self, index: int, why: Why, because: int, shared: str | float) -> None:
        self._why[index] = 1 + WHY.index(why)
        self._because[index] = because
        self._shared[index] = shared


def _mixed(digests: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Numbers as good as random for these digests and seed (splitmix64, Steele et al. 2014)."""
    mixed = digests + np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return found
