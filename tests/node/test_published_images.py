"""Replicas of images that others publish: what the image says about running it is obeyed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registries import PROGRAM, push_image, running_registry

from nagara.contract.node import BadImageError, NodeError
from nagara.contract.replica import ImageOrder, StartKind
from nagara.image.checkout import check_out
from nagara.image.images import load_tree
from nagara.image.sources import import_image
from nagara.sandbox.rights import CAP_SYS_RESOURCE, has_capability
from nagara.store.local import ObjectFolder
from nagara.store.store import Store
from nagara.testing.image_layouts import write_docker_archive, write_layout

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

APP = Path(__file__).parent.parent / "apps/obedient.py"
LOOK = """
import os, sys
answer = {
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()],
    "folder": os.getcwd(), "env": [os.environ["HOME"], os.environ["SAID"]], "arguments": sys.argv,
    "token": len(open("/run/nagara/token").read()),
    "secret": os.path.exists("/run/nagara/secrets"),
    "mine": os.access("/srv/mine", os.W_OK), "roots": os.access("/etc", os.W_OK),
}
"""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A root file system with a Python, an app and users of its own, as an archive."""
    folder = tmp_path_factory.mktemp("published")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    objects = ObjectFolder(folder / "store")
    store = Store(objects.tenant("default"))
    try:
        added, missing = import_image(store, f"venv:{venv}", "image")
        assert missing == ()
        root = folder / "root"
        check_out(store, load_tree(store, added.image), root)
    finally:
        store.close()
        objects.close()
    for part in Path(os.path.realpath(sys.executable)).parents:  # may be for root only here
        inside = root / part.relative_to("/")
        inside.chmod(inside.stat().st_mode | 0o555)
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\napp:x:4321:4322::/srv/home:/\n")
    (root / "etc/group").write_text("app:x:4322:\nvideo:x:44:app\n")
    (root / "srv/home").mkdir(parents=True)
    (root / "srv/mine").mkdir()
    os.chown(root / "srv/mine", 4321, 4322)
    shutil.copy(APP, root / "srv/app.py")
    done = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    python = os.path.realpath(sys.executable)
    inner = {
        "Env": ["SAID=by the image", "PATH=/usr/bin"], "WorkingDir": "/srv/home", "User": "app",
        "Entrypoint": [python, "-S", "/srv/app.py"], "Cmd": ["and", "more"],
    }  # fmt: skip
    return {"architecture": "amd64", "os": "linux", "config": inner}


@pytest.fixture(scope="module", params=["oci", "docker-archive", "registry"])
def published(
    request: pytest.FixtureRequest,
    layer: bytes,
    config: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The image's source as an app names it."""
    folder = tmp_path_factory.mktemp("source")
    if request.param == "oci":
        yield f"oci:{write_layout(folder / 'layout', [layer], config)}:v1"
    elif request.param == "docker-archive":
        yield f"docker-archive:{write_docker_archive(folder / 'saved.tar', [layer], config)}:app:1"
    elif shutil.which(PROGRAM) is None:
        pytest.skip("needs docker-registry (apt-get install docker-registry)")
    else:
        with running_registry(folder) as host:
            push_image(host, "team/app", "v1", [layer], config)
            yield f"registry:{host}/team/app:v1"


async def test_what_the_image_says_is_obeyed_also_by_what_is_put_back(shared, published):
    app = published.partition(":")[0]
    brought = await shared.node.bring_image(ImageOrder("default", app, published))
    spec = shared.spec(app=app, image=published, image_index=brought.index, command=())
    expected = {
        "ids": [4321, 4321, 4322, [44]], "folder": "/srv/home",
        "env": ["/srv/home", "by the image"], "arguments": ["/srv/app.py", "and", "more"],
        "token": 32, "secret": False, "mine": True, "roots": False,
    }  # fmt: skip
    first = shared.name()
    report = await shared.start(spec, first)
    assert report.kind is StartKind.PLAIN
    assert await shared.tell(first, LOOK) == expected
    await shared.stop(first)
    reason = (await shared.capture(spec)).reason
    # Another user's processes are saved only by who may raise limits.
    assert (reason is None) == has_capability(CAP_SYS_RESOURCE), reason
    again = shared.name()
    report = await shared.start(spec, again)
    assert report.kind is (StartKind.PLAIN if reason else StartKind.RESTORED)
    assert await shared.tell(again, LOOK) == expected
    await shared.stop(again)
    assert shared.leftovers() == []


async def test_the_apps_own_command_goes_before_the_images(shared, layer, config, tmp_path):
    layout = write_layout(tmp_path / "layout", [layer], config)
    brought = await shared.node.bring_image(ImageOrder("default", "own", f"oci:{layout}"))
    python, *_ = config["config"]["Entrypoint"]
    command = (python, "-S", "/srv/app.py", "mine")
    spec = shared.spec(
        app="own", image=f"oci:{layout}", image_index=brought.index, command=command,
        env={"SAID": "by the app"},
    )  # fmt: skip
    name = shared.name()
    await shared.start(spec, name)
    seen = await shared.tell(name, LOOK)
    assert (seen["arguments"], seen["env"][1]) == (["/srv/app.py", "mine"], "by the app")
    await shared.stop(name)


async def test_an_image_without_a_command_and_a_user_that_is_not_there_are_named(
    shared, config, tmp_path
):
    silent = write_layout(tmp_path / "silent", config={**config, "config": {}})
    brought = await shared.node.bring_image(ImageOrder("default", "silent", f"oci:{silent}"))
    spec = shared.spec(app="silent", image=f"oci:{silent}", image_index=brought.index, command=())
    with pytest.raises(NodeError, match="names a command"):
        await shared.start(spec)
    assert shared.leftovers() == []
    nobody = write_layout(tmp_path / "nobody", config={**config, "config": {"User": "none"}})
    with pytest.raises(BadImageError, match="user 'none' is not in its /etc/passwd"):
        await shared.node.bring_image(ImageOrder("default", "nobody", f"oci:{nobody}"))
