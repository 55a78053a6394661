"""What an install brings: the data part and a client-only one come without torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("data", "gradeflow.fetch, gradeflow.mix, dvc"),
        ("client", "gradeflow.llm, gradeflow.solve, gradeflow.promote, mlflow, openai"),
    ],
)
def test_a_small_install_has_no_torch(
    extra: str, modules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert uv is not None
    venv = tmp_path / "venv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    python = venv / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    install = [uv, "pip", "install", "--quiet", "--python", python, "--constraint", constraints, f"{ROOT}[{extra}]"]
    subprocess.run(install, check=True)
    subprocess.run([python, "-c", f"import {modules}"], cwd=tmp_path, check=True)
    found = subprocess.run([python, "-c", "import torch"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in found.stderr
    size = sum(file.stat().st_size for file in venv.rglob("*") if file.is_file())
    with capsys.disabled():
        print(f"\ngradeflow[{extra}]: {size / 2**20:.0f} MiB installed")
    assert size < 1.5 * 2**30
