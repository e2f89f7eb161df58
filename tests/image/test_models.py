import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.base.errors import UsageError
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError
from nagara.image.model_import import import_model
from nagara.image.models import (
    RECORD_NAME,
    ModelError,
    ModelFolder,
    Origin,
    UnknownModelError,
    adding,
    copy_files,
    digest_files,
    find_model,
    list_models,
    publish_model,
    read_files,
    remove_model,
)
from nagara.store.errors import AbsentError
from nagara.store.names import ObjectName, name_bytes
from nagara.store.store import Store
from nagara.testing.objects import noise


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts/weights").write_bytes(b"w" * 5000)
    return folder


def add(models_dir: Path, source: Path, name: str) -> ModelFolder:
    with adding(models_dir) as staged:
        copy_files(source, staged)
        return publish_model(models_dir, staged, name, Origin("a test", "MIT"))


def test_a_published_model_is_found_with_its_digest_and_origin(
    tmp_path: Path, source: Path
) -> None:
    added = add(tmp_path / "models", source, "tiny")
    assert added == find_model(tmp_path / "models", "tiny")
    assert (added.source, added.licence, added.size_bytes) == ("a test", "MIT", 5002)
    assert (added.path / "parts/weights").read_bytes() == b"w" * 5000
    assert (added.path / "parts/weights").stat().st_mode & 0o777 == 0o644


def test_the_digest_follows_names_and_contents_alone(tmp_path: Path, source: Path) -> None:
    first = add(tmp_path / "models", source, "one")
    (source / ".git").mkdir()
    (source / ".git/config").write_text("not of the model")
    (source / "config.json").touch()
    assert add(tmp_path / "models", source, "two").digest == first.digest
    assert digest_files(read_files(first.path)) == first.digest
    (source / "config.json").write_text("{ }")
    changed = add(tmp_path / "models", source, "three")
    assert changed.digest != first.digest
    (source / "config.json").rename(source / "config2.json")
    assert add(tmp_path / "models", source, "four").digest != changed.digest


def test_an_unknown_model_is_refused_with_the_known_names(tmp_path: Path, source: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"known: none"):
        find_model(tmp_path / "models", "tiny")
    add(tmp_path / "models", source, "b")
    add(tmp_path / "models", source, "a")
    with pytest.raises(UnknownModelError, match=r"known: a, b.*\n.*models add"):
        find_model(tmp_path / "models", "tiny")
    assert [model.name for model in list_models(tmp_path / "models")] == ["a", "b"]


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "Upper", "a" * 65, "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        find_model(tmp_path, name)


def test_a_truncated_or_missing_file_is_named_before_anything_maps_it(
    tmp_path: Path, source: Path
) -> None:
    model = add(tmp_path / "models", source, "tiny")
    weights = model.path / "parts/weights"
    weights.write_bytes(b"w" * 4999)
    with pytest.raises(ModelError, match=r"parts/weights.*4999 bytes, not 5000"):
        find_model(tmp_path / "models", "tiny")
    weights.unlink()
    with pytest.raises(ModelError, match=r"parts/weights.*missing"):
        find_model(tmp_path / "models", "tiny")
    (model.path / RECORD_NAME).write_text('{"digest": 1}')
    with pytest.raises(ModelError, match=RECORD_NAME):
        find_model(tmp_path / "models", "tiny")
    remove_model(tmp_path / "models", "tiny")
    assert add(tmp_path / "models", source, "tiny").digest == model.digest


def test_a_name_in_use_is_never_overwritten(tmp_path: Path, source: Path) -> None:
    first = add(tmp_path / "models", source, "tiny")
    (source / "config.json").write_text("{ }")
    with pytest.raises(ModelError, match="exists"):
        add(tmp_path / "models", source, "tiny")
    assert find_model(tmp_path / "models", "tiny") == first


def test_links_are_followed_and_a_link_to_nothing_is_named(tmp_path: Path, source: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"content")
    (source / "linked").symlink_to(blob)
    model = add(tmp_path / "models", source, "tiny")
    assert not (model.path / "linked").is_symlink()
    assert (model.path / "linked").read_bytes() == b"content"
    blob.unlink()
    with pytest.raises(ModelError, match=r"source/linked: is a link to nothing"):
        add(tmp_path / "models", source, "other")


def test_a_failed_addition_leaves_nothing_behind(tmp_path: Path, source: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(ModelError, match=r"source/pipe: is not a regular file"):
        add(tmp_path / "models", source, "tiny")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_what_a_killed_addition_left_is_never_found_and_goes_with_the_next(
    tmp_path: Path, source: Path
) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from nagara.image.models import adding\n"
        "with adding(pathlib.Path(sys.argv[1])) as staged:\n"
        "    (staged / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "models")], timeout=60)
    assert killed.returncode == -9
    left_over = [path.name for path in (tmp_path / "models").iterdir()]
    assert any(name.startswith(".adding-") for name in left_over)
    assert list_models(tmp_path / "models") == ()
    add(tmp_path / "models", source, "tiny")
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".lock", "tiny"]


def test_the_record_says_where_the_model_came_from(tmp_path: Path, source: Path) -> None:
    model = add(tmp_path / "models", source, "tiny")
    record = json.loads((model.path / RECORD_NAME).read_text())
    assert record["name"] == "tiny"
    assert record["digest"] == model.digest
    assert [file["path"] for file in record["files"]] == ["config.json", "parts/weights"]


def stored_model(tmp_path: Path, source: Path, store: Store) -> tuple[Path, ObjectName]:
    """The weights of a model that was brought into the store, and their object."""
    (source / "parts/weights").write_bytes(noise(3 << 20))
    model = add(tmp_path / "models", source, "tiny")
    writer = ContentWriter(store, keeps_files=True)
    import_model(store, model.path, "tiny", writer, "model.tiny")
    return model.path / "parts/weights", name_bytes(noise(3 << 20))


def test_a_models_weights_are_on_the_disk_once(tmp_path: Path, source: Path, store: Store) -> None:
    weights, name = stored_model(tmp_path, source, store)
    before, mode = weights.stat(), weights.stat().st_mode
    assert store.local.path(name).stat().st_ino == before.st_ino
    assert mode & 0o777 == 0o644
    assert list(store.local.partial.iterdir()) == []
    assert store.read(name) == noise(3 << 20)
    store.local.discard(name)
    assert weights.read_bytes() == noise(3 << 20)


def test_a_model_that_is_written_to_is_no_object_any_more(
    tmp_path: Path, source: Path, store: Store
) -> None:
    weights, name = stored_model(tmp_path, source, store)
    with weights.open("r+b") as file:
        file.write(b"?")
    with pytest.raises(AbsentError):
        store.read(name)


def test_a_model_on_another_file_system_is_copied(
    tmp_path: Path, source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    weights, name = stored_model(tmp_path, source, store)
    assert store.local.path(name).stat().st_ino != weights.stat().st_ino
    assert store.read(name) == noise(3 << 20)


def test_a_file_that_changes_while_it_is_hashed_gets_no_second_name(
    tmp_path: Path, source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "models/tiny/parts/weights"
    real = os.link

    def late(path: bytes, target: Path, **options: bool) -> None:
        with weights.open("r+b") as file:
            file.write(b"?")
        real(path, target, **options)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(SourceError, match="changed while it was read"):
        stored_model(tmp_path, source, store)
    assert list(store.local.objects.iterdir()) == []
    assert list(store.local.partial.iterdir()) == []
