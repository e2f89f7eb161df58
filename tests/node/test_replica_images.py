"""What an image's configuration means for its replicas, and how touches are counted."""

import json
from typing import Any

import pytest

from nagara.contract.replica import TierRead
from nagara.image.identity import KEY, Identity, to_config
from nagara.image.images import Image
from nagara.node.files_read import difference, touched_bytes
from nagara.node.replica_images import app_image
from nagara.node.run_settings import SYSTEM_PATH, run_settings
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
    found = run_settings(image(config))
    assert (found.env, found.folder) == (env, folder)


@pytest.mark.parametrize(
    ("config", "command"),
    [
        (None, ()), ({"Cmd": ["a", "b"]}, ("a", "b")), ({"Entrypoint": ["e"]}, ("e",)),
        ({"Entrypoint": ["e", "-x"], "Cmd": ["a"]}, ("e", "-x", "a")), ({"Cmd": "crafted"}, ()),
        ({"Entrypoint": [1], "Cmd": ["a"]}, ("a",)),
    ],
)  # fmt: skip
def test_a_command_is_entry_point_and_arguments(config: Any, command: tuple[str, ...]) -> None:
    assert run_settings(image(config)).command == command


def test_other_settings_are_another_fingerprint() -> None:
    identity = to_config(Identity(1, 2, (3,), "/x"))
    configs: list[Any] = [
        None, {"Env": ["A=b"]}, {"WorkingDir": "/x"}, {"Cmd": ["a"]}, {KEY: identity},
        {KEY: {**identity, "groups": []}}, {KEY: {**identity, "home": "/"}},
    ]  # fmt: skip
    found = [json.dumps(run_settings(image(config)).fingerprint()) for config in configs]
    assert len(set(found)) == len(configs)


def test_of_a_large_object_the_touched_chunks_count() -> None:
    large = ObjectName(b"\x02" * 32, (64 << 20) + 10)
    assert touched_bytes((NAME, 0)) == 5000
    assert touched_bytes((large, 3)) == CHUNK_BYTES
    assert touched_bytes((large, 16)) == 10


def test_what_tiers_gave_meanwhile_is_thedifference() -> None:
    before = (TierRead("local", 5, 500),)
    after = (TierRead("local", 7, 900), TierRead("zone", 1, 10), TierRead("s3", 0, 0))
    assert difference(before, after) == (TierRead("local", 2, 400), TierRead("zone", 1, 10))


def test_names_of_an_apps_trees_differ() -> None:
    index = str(NAME)
    assert app_image("a", index) != app_image("b", index)
    assert app_image("a", index).startswith("app.a.")
