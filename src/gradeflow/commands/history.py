"""`gradeflow history`: the champions, one after the other."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradeflow import champions, registry, tracking
from gradeflow.params import Params


def main(params: Params) -> None:
    name = params.promote.model
    tracking.connect(params.tracking, Path())
    moves = champions.history(name)
    champion = registry.get_alias(name, champions.CHAMPION)
    console = Console(highlight=False)
    if not moves:
        console.print(f"{name} has no history: {champion or 'there is no champion'}. `gradeflow promote` writes it")
        return
    table = Table("", "champion since (UTC)", "version", "adapter", "by", "run", "why", title=name)
    for move in moves:
        here = "*" if champion and move is moves[-1] and champion.version == move.version else ""
        when = f"{move.at:%Y-%m-%d %H:%M:%S}"
        table.add_row(here, when, str(move.version), move.digest[:12], move.kind, move.run_id[:8], escape(move.why))
    console.print(table)
    if champion is None or champion.version != moves[-1].version:
        now = champion or "no version"
        console.print(
            f"The alias is {now}: it was set by hand, or a promotion was cut off. The next promotion enters an alias "
            "that is new here, and else sets what the history says."
        )
