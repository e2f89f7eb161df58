import shutil
import subprocess
from pathlib import Path

import pytest

from nagara.sandbox import criu_folder
from nagara.sandbox.criu_folder import install_criu_from, install_criu_with_apt
from nagara.sandbox.tools import ToolError, Tools, own_criu, read_version

LIB = "usr/lib/some-linux-gnu"


def make_tree(folder: Path, says: str) -> Path:
    """An unpacked tree whose loader is a script: it answers instead of loading CRIU."""
    (folder / LIB).mkdir(parents=True)
    (folder / "usr/sbin").mkdir(parents=True)
    (folder / "usr/sbin/criu").write_text("not a program")
    loader = folder / LIB / "ld-linux-some.so.2"
    loader.write_text(f'#!/bin/sh\necho "{says}"\necho "$@" >&2\n')
    loader.chmod(0o755)
    return folder


def test_an_unpacked_tree_is_taken_and_started_through_its_own_loader(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", "Version: 4.2.1")
    criu = install_criu_from(tmp_path / "with blank/tools", source)
    shutil.rmtree(source)
    done = subprocess.run([criu, "dump", "-t", "1"], capture_output=True, text=True, timeout=60)
    folder = criu.parent.resolve()
    assert done.stderr.strip() == (
        f"--library-path {folder}/{LIB} {folder}/usr/sbin/criu dump -t 1"
    )
    assert criu == own_criu(tmp_path / "with blank/tools")


def test_packages_are_unpacked_beside_each_other(tmp_path: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    packages = tmp_path / "packages"
    packages.mkdir()
    whole = make_tree(tmp_path / "whole", "Version: 4.3")
    for name, part in (("criu", "usr/sbin"), ("libc6", "usr/lib")):
        package = tmp_path / name
        shutil.copytree(whole / part, package / part)
        (package / "DEBIAN").mkdir()
        (package / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: A <a@b>\n"
            "Description: for a test\n"
        )
        build = ["dpkg-deb", "--build", str(package), str(packages / f"{name}.deb")]
        subprocess.run(build, check=True, capture_output=True, timeout=60)
    assert read_version(install_criu_from(tmp_path / "tools", packages)) == "4.3"


def test_a_second_installation_replaces_the_first_and_leaves_one_tree(tmp_path: Path) -> None:
    tools_dir = tmp_path / "tools"
    (tools_dir / ".criu-torn/usr").mkdir(parents=True)
    install_criu_from(tools_dir, make_tree(tmp_path / "a", "Version: 4.2"))
    install_criu_from(tools_dir, make_tree(tmp_path / "b", "Version: 4.4"))
    assert read_version(own_criu(tools_dir)) == "4.4"
    assert len(list(tools_dir.glob(".criu-*"))) == 1


@pytest.mark.parametrize(
    ("says", "match"), [("Version: 3.17.1", "3.17.1 is too old, 4.2"), ("oops", "does not run")]
)
def test_a_criu_that_is_too_old_or_broken_changes_nothing(
    tmp_path: Path, says: str, match: str
) -> None:
    tools_dir = tmp_path / "tools"
    install_criu_from(tools_dir, make_tree(tmp_path / "good", "Version: 4.2"))
    with pytest.raises(ToolError, match=match):
        install_criu_from(tools_dir, make_tree(tmp_path / "bad", says))
    assert read_version(own_criu(tools_dir)) == "4.2"
    assert len(list(tools_dir.glob(".criu-*"))) == 1


def test_what_is_lacking_in_the_given_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ToolError, match=r"neither \.deb files nor"):
        install_criu_from(tmp_path / "tools", tmp_path / "empty")
    without_loader = make_tree(tmp_path / "a", "Version: 4.2")
    (without_loader / LIB / "ld-linux-some.so.2").unlink()
    with pytest.raises(ToolError, match="loader"):
        install_criu_from(tmp_path / "tools", without_loader)
    without_criu = make_tree(tmp_path / "b", "Version: 4.2")
    (without_criu / "usr/sbin/criu").unlink()
    with pytest.raises(ToolError, match="usr/sbin/criu"):
        install_criu_from(tmp_path / "tools", without_criu)


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    (tmp_path / "broken.deb").write_text("no archive")
    with pytest.raises(ToolError, match=r"broken\.deb: the package cannot be unpacked"):
        install_criu_from(tmp_path / "tools", tmp_path)


def test_a_machine_without_apt_is_told_about_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"not a Debian system[^\0]*--from DIR"):
        install_criu_with_apt(tmp_path / "tools")


def test_another_distributions_archive_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'Ubuntu|Ubuntu|main|http://archive.invalid/ubuntu/'\n")
    for program in (apt, tmp_path / "dpkg-deb"):
        program.touch()
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(criu_folder.os, "geteuid", lambda: 1000)
    with pytest.raises(ToolError, match=r"no Debian archive[^\0]*--from DIR"):
        install_criu_with_apt(tmp_path / "tools")


@pytest.mark.root
def test_the_prepared_criu_can_be_taken_over_from_its_own_tree(
    tools: Tools, tmp_path: Path
) -> None:
    assert tools.criu is not None
    if not (tools.criu.parent / "usr").is_dir():
        pytest.skip("needs a CRIU folder; this machine's own CRIU is new enough")
    copied = install_criu_from(tmp_path / "tools", tools.criu.parent.resolve())
    assert read_version(copied) == tools.criu_version
