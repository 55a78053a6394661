"""`gradeflow rollback`: a former champion becomes champion again."""

from collections.abc import Sequence
from pathlib import Path

from gradeflow import champions, registry, tracking
from gradeflow.champions import Move, Overtaken
from gradeflow.errors import PromotionError
from gradeflow.params import Params
from gradeflow.registry import Version


def main(params: Params, *, to: int = 0, reason: str = "") -> None:
    """Put the champion before back, or version `to`.

    Raises:
        PromotionError: there is none, it is champion already, or another move came first.
    """
    name = params.promote.model
    tracking.connect(params.tracking, Path())
    champion, after = champions.now(name) if to else champions.current(name)
    moves = champions.history(name)
    if champion is None and not moves:
        raise PromotionError(f"{name} has no champion that could be rolled back. `gradeflow promote` makes one")
    now = champion.version if champion else moves[-1].version
    target = _version(name, to or _former(moves))
    if champion and target.version == now:
        raise PromotionError(f"{target} is the champion already")
    why = f"in the place of version {now}" + (f", because: {reason.strip()}" if reason.strip() else "")
    with tracking.start_run("rollback", {"promote": {"model": name}}) as run:
        run.set_tags({registry.ADAPTER_DIGEST: target.digest})
        try:
            champions.move(name, target, after=after, kind="rollback", why=why, run_id=run.id)
        except Overtaken as overtaken:
            raise PromotionError(f"{overtaken}; nothing was rolled back. See `gradeflow history`") from None
        registry.describe(target, f"Champion again {why}. Run {run.id}.")
    print(f"{target} is champion again, {why}")


def _former(moves: Sequence[Move]) -> int:
    """The version below the last in the stack that promotions heap up and rollbacks take from."""
    stack: list[int] = []
    for move in moves:
        if move.version in stack:
            del stack[stack.index(move.version) + 1 :]
        else:
            stack.append(move.version)
    if len(stack) < 2:
        raise PromotionError(f"version {stack[0]} is the first champion: there is none before it. Name one with --to")
    return stack[-2]


def _version(name: str, number: int) -> Version:
    if (found := registry.get_version(name, number)) is None:
        raise PromotionError(f"{name} has no version {number}; see `gradeflow history`")
    return found
