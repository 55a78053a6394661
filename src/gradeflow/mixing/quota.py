"""How many rows to draw of each problem type and source: shares that are exact to the row."""

from collections.abc import Collection, Mapping


def shares(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` divided by weight, exactly, by largest remainder; ties go to the earlier name."""
    all_ = sum(weights.values())
    exact = {name: total * weight / all_ for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    rest = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in rest[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def quotas(
    there: Mapping[str, int], weights: Mapping[str, float], total: int, whole: Collection[str] = ()
) -> dict[str, int]:
    """Rows to draw of each source out of those that are `there`: `total` in all, as long as there are so many.

    Those named in `whole` are drawn to the last row. Where another has fewer than its share, the rest of them make up
    for it by their weights.
    """
    found = {name: there[name] for name in whole}
    open_ = [name for name in there if name not in found]
    while open_:
        rest = max(0, total - sum(found.values()))
        due = shares({name: weights[name] for name in open_}, rest)
        short = [name for name in open_ if there[name] < due[name]]
        if not short:
            return {name: (found | due)[name] for name in there}
        found |= {name: there[name] for name in short}
        open_ = [name for name in open_ if name not in found]
    return {name: found[name] for name in there}
