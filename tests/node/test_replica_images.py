"""What an image's configuration means for its replicas, and how touches are counted."""

from typing import Any

import pytest

from nagara.contract.replica import TierRead
from nagara.image.images import Image
from nagara.node.replica_images import (
    SYSTEM_PATH,
    _difference,
    _touched_bytes,
    app_image,
    run_settings,
)
from nagara.store.names import CHUNK_BYTES, ObjectName

NAME = ObjectName(b"\x01" * 32, 5000)


def image(config: dict[str, Any] | None) -> Image:
    return Image("x", NAME, NAME, "oci:/x", 1, 1, config=config)


@pytest.mark.parametrize(
    ("config", "env", "folder"),
    [
        (None, {"PATH": SYSTEM_PATH}, "/"),
        ({"Env": ["PATH=/app/bin", "A=b=c", "EMPTY="]},
         {"PATH": "/app/bin", "A": "b=c", "EMPTY": ""}, "/"),
        ({"WorkingDir": "/srv/app", "User": "1"}, {"PATH": SYSTEM_PATH}, "/srv/app"),
        ({"WorkingDir": "srv", "Env": None}, {"PATH": SYSTEM_PATH}, "/srv"),
    ],
)  # fmt: skip
def test_environment_and_folder_are_the_images(config: Any, env: Any, folder: str) -> None:
    assert run_settings(image(config)) == (env, folder)


def test_of_a_large_object_the_touched_chunks_count() -> None:
    large = ObjectName(b"\x02" * 32, (64 << 20) + 10)
    assert _touched_bytes((NAME, 0)) == 5000
    assert _touched_bytes((large, 3)) == CHUNK_BYTES
    assert _touched_bytes((large, 16)) == 10


def test_what_tiers_gave_meanwhile_is_the_difference() -> None:
    before = (TierRead("local", 5, 500),)
    after = (TierRead("local", 7, 900), TierRead("zone", 1, 10), TierRead("s3", 0, 0))
    assert _difference(before, after) == (TierRead("local", 2, 400), TierRead("zone", 1, 10))


def test_names_of_an_apps_trees_differ() -> None:
    index = str(NAME)
    assert app_image("a", index) != app_image("b", index)
    assert app_image("a", index).startswith("app.a.")
