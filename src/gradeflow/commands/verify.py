"""`gradeflow verify`: does what a registered adapter rests on still hold?"""

from pathlib import Path

from rich.console import Console

from gradeflow import tracking
from gradeflow.errors import PromotionError
from gradeflow.params import Params
from gradeflow.promotion.verification import links

MARKS = {True: "ok ", False: "BAD", None: "-  "}


def main(params: Params, *, model: str = "") -> None:
    """Follow the chain of a version, and print it.

    Raises:
        PromotionError: a link does not hold.
    """
    reference = model or f"models:/{params.promote.model}@champion"
    tracking.connect(params.tracking, Path())
    console = Console(highlight=False, soft_wrap=True)
    broken = []
    for link in links(reference, params):
        console.print(f"{MARKS[link.holds]} {link.name}: {link.said}", markup=False)
        if link.holds is False:
            broken.append(link.name)
    if broken:
        raise PromotionError(f"{reference}: {len(broken)} links do not hold: {', '.join(broken)}")
