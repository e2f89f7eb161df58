"""Replicas whose files are an imported image: started, saved and put back on its mounts."""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nagara.contract.node import BadImageError
from nagara.contract.replica import ImageOrder, ModelMount, StartKind
from nagara.image.images import find_image, list_images
from nagara.image.mounting import ImageMounts
from nagara.node.clearing import clear
from nagara.node.leaks import holdings
from nagara.node.replica_images import app_image
from nagara.store.moving import push
from nagara.store.roots import read_list
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

# What an app does to the files of its image before it is saved.
FIRST = """
import mmap, os
mapped_file = open("/srv/data/large", "rb")
mapped = mmap.mmap(mapped_file.fileno(), 0, prot=mmap.PROT_READ)
first_byte = mapped[0]
os.chmod("/srv/data/small", 0o600)
os.unlink("/srv/data/gone")
os.rename("/srv/data/folder", "/srv/data/renamed")
open("/srv/data/appended", "a").write("more")
os.truncate("/srv/data/cut", 5)
"""
LOOK = """
import os
answer = {
    "mapped": [mapped[0], mapped[-1], mapped[40 << 20]],
    "mode": oct(os.stat("/srv/data/small").st_mode), "small": open("/srv/data/small").read(),
    "gone": os.path.exists("/srv/data/gone"),
    "renamed": open("/srv/data/renamed/inner").read(), "folder": os.path.exists("/srv/data/folder"),
    "appended": open("/srv/data/appended").read(), "cut": open("/srv/data/cut").read(),
}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file tree with a Python of its own and data."""
    folder = tmp_path_factory.mktemp("tree")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def source(tree: Path) -> str:
    return f"venv:{tree / 'venv'}"


@pytest.fixture(scope="module")
def data(tree: Path) -> Path:
    """A model folder: data that is shown beside the image."""
    folder = tree / "data"
    (folder / "folder").mkdir(parents=True)
    (folder / "folder/inner").write_text("inner " * 1000)
    (folder / "large").write_bytes(noise((64 << 20) + 4321))
    for name in ("small", "gone", "appended", "cut"):
        (folder / name).write_text(f"{name} " * 1000)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def imaged(shared: Any, source: str) -> Any:
    """The node, and a way to make specs of an image."""
    report = await shared.node.bring_image(ImageOrder("default", "obedient", source))
    assert report.missing == ()

    def spec(**changes: Any) -> Any:
        return shared.spec(**{"image": source, "image_index": report.index, **changes})

    shared.image_spec = spec
    shared.image_report = report
    return shared


def mounts_of(yard: Any) -> ImageMounts:
    return yard.node._images.opened()


async def settled(yard: Any) -> None:
    """What a start leaves for later is done."""
    await yard.node._leisure.ended()


async def test_a_replica_sees_its_image_and_nothing_of_the_machine(imaged, tree):
    name = imaged.name()
    report = await imaged.start(imaged.image_spec(), name)
    assert report.kind is StartKind.PLAIN
    assert report.files.kind == "venv"
    assert report.files.objects > 500
    seen = await imaged.tell(
        name,
        "import os, shutil, sys; open('/srv-own', 'w').write('x');"
        "answer = [os.path.realpath(sys.executable), shutil.which('python'),"
        f" os.path.exists({str(imaged.state)!r}), os.path.exists('/var/lib/dpkg')]",
    )
    assert seen == [os.path.realpath(sys.executable), str(tree / "venv/bin/python"), False, False]
    await imaged.stop(name)
    assert imaged.leftovers() == []
    assert not [p for p in mounts_of(imaged).pins() if "#" in p.holder]


async def test_bringing_an_image_again_brings_nothing(imaged, source):
    again = await imaged.node.bring_image(ImageOrder("default", "obedient", source))
    assert again.index == imaged.image_report.index
    assert again.new_bytes == 0
    other = await imaged.node.bring_image(ImageOrder("default", "another", source))
    assert (other.index, other.new_bytes) == (again.index, 0)


async def test_a_first_start_says_what_it_read_and_that_becomes_the_trace(imaged, source):
    report = await imaged.node.bring_image(ImageOrder("default", "traced", source))
    spec = imaged.image_spec(app="traced")
    first = await imaged.start(spec)
    assert first.files.way == "lazy"
    assert 0 < first.files.read_objects < first.files.objects
    assert 0 < first.files.read_bytes < first.files.size_bytes
    await settled(imaged)
    store = mounts_of(imaged).store("default")
    image = find_image(store, app_image("traced", report.index))
    assert image.trace is not None
    second = await imaged.start(spec)
    assert second.files.way == "local"  # all was here from the beginning, and a start was noted
    await imaged.stop(first.replica, second.replica)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(imaged, data) -> ModelMount:
    """A model of the machine that is shown at /models/data."""
    models = imaged.state / "models"
    models.mkdir(exist_ok=True)
    shutil.copytree(data, models / "data")
    return ModelMount("data", "sha256:0123456789abcdef")


def with_model(yard: Any, model: ModelMount, app: str, **changes: Any) -> Any:
    text = FIRST.replace("/srv/data", f"/models/{model.name}")
    return yard.image_spec(app=app, models=(model,), env={"FIRST": text}, **changes)


def seen_before(data: Path) -> dict[str, Any]:
    large = (data / "large").read_bytes()
    return {
        "mapped": [large[0], large[-1], large[40 << 20]],
        "mode": "0o100600",
        "small": "small " * 1000,
        "gone": False,
        "renamed": "inner " * 1000,
        "folder": False,
        "appended": "appended " * 1000 + "more",
        "cut": "cut c",
    }


LOOK_AT_MODEL = LOOK.replace("/srv/data", "/models/data")


@pytest.mark.parametrize("at_capture", ["lazy", "local"])
async def test_what_was_saved_on_one_layer_is_put_back_on_the_other(
    imaged, source, data, model, at_capture
):
    app = f"saved-{at_capture}"
    order = ImageOrder("default", app, source, (model,))
    index = (await imaged.node.bring_image(order)).index
    spec = with_model(imaged, model, app)
    if at_capture == "local":
        await imaged.stop((await imaged.start(spec)).replica)
        await settled(imaged)
    captured = await imaged.capture(spec)
    assert captured.reason is None
    await settled(imaged)
    if at_capture == "local":
        forget_some(imaged, app_image(app, index))
    started = await asyncio.gather(*(imaged.start(spec) for _ in range(3)))
    assert {(each.kind, each.fallback) for each in started} == {(StartKind.RESTORED, None)}
    other = {"lazy": "local", "local": "lazy"}[at_capture]
    assert {each.files.way for each in started} == {other}
    for each in started:
        assert await imaged.tell(each.replica, LOOK_AT_MODEL) == seen_before(data)
    await imaged.stop(*(each.replica for each in started))
    assert imaged.leftovers() == []


def forget_some(yard: Any, name: str) -> None:
    """Puts an image where only a farther tier has all of it."""
    store = mounts_of(yard).store("default")
    image = find_image(store, name)
    far = yard.state / "far"
    if not far.exists():
        far.mkdir()
        settings = {"tiers": [{"kind": "folder", "path": str(far)}]}
        (yard.state / "store/settings.json").write_text(json.dumps(settings))
    push(store, FolderTier(far, "default"), image.to_root())
    for each in read_list(store, image.list):
        if each not in (image.index, image.list):
            store.local.discard(each)
    yard.node._images._mounts._stores.clear()  # opened anew, with the tier
    kill_daemon(yard)


async def test_a_file_daemon_that_is_killed_takes_nobody_along(imaged, source, data):
    fresh = imaged.state / "models/fresh"
    shutil.copytree(data, fresh)
    (fresh / "large").write_bytes(noise((64 << 20) + 99, 7))  # nobody has a page of it cached
    app, model = "outliving", ModelMount("fresh", "sha256:fedcba9876543210")
    order = ImageOrder("default", app, source, (model,))
    await imaged.node.bring_image(order)
    spec = with_model(imaged, model, app)
    assert (await imaged.capture(spec)).reason is None
    await settled(imaged)
    forget_some(imaged, "model.fresh.fedcba9876543210")
    restored = await imaged.start(spec)
    assert (restored.kind, restored.files.way) == (StartKind.RESTORED, "lazy")
    kill_daemon(imaged)
    whole = "import hashlib; answer = hashlib.sha256(mapped).hexdigest()"
    expected = hashlib.sha256((fresh / "large").read_bytes()).hexdigest()
    assert await imaged.tell(restored.replica, whole) == expected
    await imaged.stop(restored.replica)


def kill_daemon(yard: Any) -> None:
    """Ends the file daemon; a new one takes its place."""
    os.kill(mounts_of(yard).lazy_layer("default").ask({"op": "ping"})["pid"], signal.SIGKILL)


async def test_a_next_node_takes_over_what_a_replica_holds(make_yard, tools, source):
    yard = make_yard()
    try:
        await yard.open()
        index = (await yard.node.bring_image(ImageOrder("default", "obedient", source))).index
        spec = yard.spec(image=source, image_index=index)
        stays = (await yard.start(spec)).replica
        await settled(yard)
        # Of a replica that nobody knows any more.
        image = find_image(mounts_of(yard).store("default"), app_image("obedient", index))
        mounts_of(yard).mount("default", image, f"{yard.state}/node/replicas/vanished#0")
        await yard.close(stop_replicas=False)
        found = await holdings(yard.state)
        assert "file daemon" in {each.owned.kind for each in found}
        assert not [each for each in found if each.answered_by is None]
        await yard.open()
        assert {pin.holder for pin in mounts_of(yard).pins()} == {
            f"{yard.state}/node/replicas/{stays}#0"
        }
        assert await yard.tell(stays, "import decimal; answer = str(decimal.Decimal(1))") == "1"
        await yard.stop(stays)
        assert mounts_of(yard).pins() == []
        await yard.close()
        assert yard.leftovers() == []
    finally:
        await yard.close()
        yard.force_away()


async def test_mounts_that_nobody_answers_for_are_found_and_cleared(make_yard, tools, source):
    yard = make_yard()
    try:
        await yard.open()
        index = (await yard.node.bring_image(ImageOrder("default", "obedient", source))).index
        image = find_image(mounts_of(yard).store("default"), app_image("obedient", index))
        vanished = f"{yard.state}/node/replicas/vanished#0"
        mounts_of(yard).mount("default", image, vanished, prefer_lazy=True)
        yard.node._images.close(take_down=False)  # as a killed node would leave it
        await yard.close()
        orphaned = [e.owned.kind for e in await holdings(yard.state) if e.answered_by is None]
        assert {"mount", "file daemon"} <= set(orphaned)
        await clear(yard.state, keep_replicas=False)
        assert await holdings(yard.state) == []
    finally:
        await yard.close()
        yard.force_away()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("dir:/nowhere/at/all", "is no folder"),
        ("venv:/usr", "is no virtual environment"),
        ("oci:/nowhere/layout:v1", "is not there"),
        ("docker-archive:/nowhere.tar", "is not there"),
        ("image:never-imported", "no image named"),
        ("registry:127.0.0.1:1/team/app:1", "127.0.0.1"),
    ],
)
async def test_a_source_that_cannot_be_had_is_named(imaged, image, words):
    with pytest.raises(BadImageError) as caught:
        await imaged.node.bring_image(ImageOrder("default", "bad", image))
    assert words in str(caught.value)
    assert image.partition(":")[2].split(":")[0] in str(caught.value)


async def test_an_image_of_nagaras_own_state_is_refused(imaged):
    for image in (f"dir:{imaged.state}", f"dir:{imaged.state}/node", f"dir:{imaged.state.parent}"):
        with pytest.raises(BadImageError, match="own state"):
            await imaged.node.bring_image(ImageOrder("default", "bad", image))


async def test_one_tenant_cannot_name_anothers_image(imaged, source):
    index = imaged.image_report.index
    await imaged.node.bring_image(ImageOrder("default", "obedient", source))
    for image in (f"image:{app_image('obedient', index)}", "image:../../default"):
        with pytest.raises(BadImageError, match=r"no image named|cannot be a name"):
            await imaged.node.bring_image(ImageOrder("other", "obedient", image))
    # Knowing the index is not enough either.
    spec = imaged.image_spec(tenant="other", image=f"image:{app_image('obedient', index)}")
    with pytest.raises(BadImageError):
        await imaged.start(spec)
    assert imaged.leftovers() == []


async def test_without_root_an_image_is_copied_and_is_a_plain_processs_root(
    make_yard, tree, source, data
):
    yard = make_yard(with_tools=False)
    shutil.copytree(data, yard.state / "models/data")
    try:
        await yard.open_process_node()
        model = ModelMount("data", "sha256:0123456789abcdef")
        order = ImageOrder("default", "obedient", source, (model,))
        index = (await yard.node.bring_image(order)).index
        spec = yard.spec(image=source, image_index=index, models=(model,))
        started = [await yard.start(spec) for _ in range(2)]
        assert {each.files.way for each in started} == {"copy"}
        for each in started:
            seen = await yard.tell(
                each.replica,
                "import os, shutil; open('/srv-own', 'x').close();"
                " answer = [shutil.which('python'),"
                " os.path.exists('/var/lib/dpkg'), open('/models/data/small').read(5)]",
            )
            assert seen == [str(tree / "venv/bin/python"), False, "small"]
        await yard.stop(*(each.replica for each in started))
        assert mounts_of(yard).pins() == []
        await yard.close()
        assert yard.leftovers() == []
    finally:
        await yard.close()
        yard.force_away()


async def test_an_app_keeps_its_newest_trees_only(imaged, tree):
    folder = tree / "changing"
    folder.mkdir()
    seen = []
    for number in range(6):
        (folder / "file").write_text(f"content {number}")
        order = ImageOrder("default", "changing", f"dir:{folder}")
        seen.append((await imaged.node.bring_image(order)).index)
    local = mounts_of(imaged).store("default").local
    names = {each.name for each in list_images(local)}
    kept = [index for index in seen if app_image("changing", index) in names]
    assert kept == seen[-4:]
    await imaged.node.forget_app("default", "changing")
    assert not [e for e in list_images(local) if e.name.startswith("app.changing.")]
