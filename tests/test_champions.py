"""Two promotions at once, in two processes, on the stores that a person and a team have."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradeflow import champions, params, promote, registry
from support import postgres
from support.evaluated import SHIPPED, World

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]
PROMOTE = """
import json, sys, time
from pathlib import Path
from gradeflow import champions, params, promote

settings = params.load(Path(sys.argv[1]), json.loads(sys.argv[2]))
mine, others, real = Path(sys.argv[4]), Path(sys.argv[5]), champions.move

def move(*arguments, **named):
    mine.touch()
    while not others.exists():
        time.sleep(0.01)
    return real(*arguments, **named)

champions.move = move
promote.main(settings, evaluation=sys.argv[3])
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def uri(request: pytest.FixtureRequest, store: Path, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'mlflow.db'}"
        return
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL: neither initdb nor /usr/lib/postgresql/*/bin is there")
    with postgres.running() as address:
        yield address


def test_of_two_promotions_at_once_exactly_one_wins_and_the_other_is_judged_against_it(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"tracking.uri": uri, "promote.model": "policy"}
    world = World(params.load(SHIPPED, changes), tmp_path / "adapters")
    good, better = world.evaluation(30, (1, 60)), world.evaluation(30, (2, 90))
    flags = [tmp_path / "first", tmp_path / "second"]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROMOTE, str(SHIPPED), json.dumps(changes), run, *map(str, order)],
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")},
        )
        for run, order in ((good, flags), (better, flags[::-1]))
    ]
    said = [" ".join(process.communicate(timeout=300)[0].split()) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    overtaken = ["another champion came first. Judging against it." in one for one in said]
    assert sorted(overtaken) == [False, True]
    moves = champions.history("policy")
    if overtaken[0]:
        assert "Not promoted over the champion: a difference of -30.0%" in said[0]
        assert len(moves) == 1
    else:
        assert "Promoted over the champion: a difference of +30.0%" in said[1]
        assert len(moves) == 2
    champion = registry.get_alias("policy", "champion")
    assert champion
    assert champion.digest == world.digests[better][0]
    assert len(registry.versions("policy" + champions.SUFFIX)) == len(moves) + 1
    assert all(move.done for move in moves)


def test_a_late_helper_does_not_set_the_alias_back(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has read the log before a later move, and sets the alias after it."""
    settings = params.load(SHIPPED, {"promote.model": "late", "tracking.experiment": "late"})
    world = World(settings, tmp_path)
    first, second = world.evaluation(30, (1, 60)), world.evaluation(30, (2, 90))
    real, waiting = registry.set_alias, [second]

    def set_alias(version: registry.Version, alias: str) -> None:
        if alias == "champion" and version.digest == world.digests[first][0] and waiting:
            promote.main(settings, evaluation=waiting.pop())  # settles the first move itself, and makes another
        real(version, alias)

    monkeypatch.setattr(registry, "set_alias", set_alias)
    promote.main(settings, evaluation=first)
    assert [move.version for move in champions.history("late")] == [1, 2]
    champion = registry.get_alias("late", "champion")
    assert champion
    assert champion.version == 2
