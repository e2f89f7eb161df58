from pathlib import Path

import pytest

from nagara.cli.settings import Settings, read_settings
from nagara.control.state_folder import default_state


def test_root_keeps_its_state_with_the_system() -> None:
    assert default_state({"XDG_STATE_HOME": "/elsewhere"}, 0) == Path("/var/lib/nagara")


def test_a_user_keeps_it_where_the_desktop_says() -> None:
    assert default_state({"XDG_STATE_HOME": "/elsewhere"}, 1000) == Path("/elsewhere/nagara")


@pytest.mark.parametrize("environ", [{}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}])
def test_a_user_without_a_valid_wish_keeps_it_in_the_home_folder(environ: dict[str, str]) -> None:
    assert default_state(environ, 1000) == Path.home() / ".local/state/nagara"


def test_a_relative_state_folder_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = read_settings(Path("here"), verbose=False)
    assert settings == Settings(tmp_path / "here")
    assert settings.models_dir == tmp_path / "here/models"
    assert settings.tools_dir == tmp_path / "here/tools"
