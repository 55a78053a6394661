import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradeflow import params, tracking
from gradeflow.errors import TrackingError
from support.tracked import client

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


def test_importing_tracking_and_registry_does_not_import_mlflow() -> None:
    code = "import sys, gradeflow.tracking, gradeflow.registry; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9: no MLflow server answers there. Start the server"),
        ("sqlite:////nowhere/at/all/mlflow.db", "unable to open database file. Check tracking.uri"),
        ("nonsense://x", "unsupported URI 'nonsense://x'"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_in_one_line(store: Path, uri: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(TrackingError, match=message) as caught:
        tracking.connect(params.Tracking(uri=uri, experiment="x"), store)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 15


def test_a_file_that_is_no_database_is_left_as_it_was(store: Path, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("plain text " * 500)
    with pytest.raises(TrackingError, match="file is not a database"):
        tracking.connect(params.Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="x"), store)
    assert (tmp_path / "mlflow.db").read_text() == "plain text " * 500


def test_a_first_start_that_is_killed_while_mlflow_makes_its_tables_spoils_no_later_one(tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "import mlflow.store.db.utils as made\n"
        "made._upgrade_db = lambda engine: os.kill(os.getpid(), 9)\n"
        "from gradeflow import params, tracking\n"
        "tracking.connect(params.Tracking(uri='', experiment='x'), pathlib.Path.cwd())\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    again = code.replace("made._upgrade_db", "made.unused")
    for said, status in ((code, -signal.SIGKILL), (again, 0)):
        assert subprocess.run([sys.executable, "-c", said], check=False, cwd=tmp_path, env=kept).returncode == status
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"mlflow.db"}


def test_a_password_in_the_address_of_a_store_is_not_printed(store: Path) -> None:
    with pytest.raises(TrackingError, match="no MLflow server answers") as caught:
        tracking.connect(params.Tracking(uri="http://user:geheim123@127.0.0.1:9", experiment="x"), store)
    assert "geheim123" not in str(caught.value)


def test_a_server_that_is_gone_is_given_up_within_half_a_minute(store: Path) -> None:
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR as FACTOR
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_BACKOFF_JITTER as JITTER
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as RETRIES

    waits = [FACTOR.get() * 2**number + JITTER.get() for number in range(RETRIES.get())]
    assert RETRIES.get() > 0
    assert sum(waits) < 30


def test_a_deleted_experiment_is_named_with_the_way_back(store: Path) -> None:
    client().delete_experiment(client().create_experiment("deleted"))
    with pytest.raises(TrackingError, match=r"experiment deleted is deleted.*mlflow experiments restore -x"):
        tracking.connect(params.Tracking(uri="", experiment="deleted"), store)
