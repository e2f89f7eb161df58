import json
from pathlib import Path
from typing import Any

import pytest

from nagara.base.errors import UsageError
from nagara.store.configured import open_folder, open_store, read_settings


def write(folder: Path, document: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(document))


def test_without_a_file_there_is_only_the_local_folder(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "store")
    store = open_store(folder, "default")
    assert store.transfer.tiers == ()
    store.close()
    folder.close()


def test_tiers_come_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("some token\n")
    write(
        tmp_path / "store",
        {
            "limit": "1GiB",
            "budget": "64MiB",
            "tiers": [
                {"kind": "http", "url": "http://127.0.0.1:1", "token_file": str(tmp_path / "token"),
                 "write": True, "name": "zone"},
                {"kind": "folder", "path": str(tmp_path / "far")},
            ],
        },
    )  # fmt: skip
    folder = open_folder(tmp_path / "store")
    assert folder.limit_bytes == 1 << 30
    store = open_store(folder, "default")
    assert store.transfer.budget.limit_bytes == 64 << 20
    assert [(tier.name, tier.can_write) for tier in store.transfer.tiers] == [
        ("zone", True),
        ("folder", True),
    ]
    store.close()
    folder.close()


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"limits": "1GB"},
        {"limit": "many"},
        {"tiers": {}},
        {"tiers": [{"kind": "ftp"}]},
        {"tiers": [{"kind": "folder", "path": "/x", "speed": 1}]},
        {"tiers": ["x"]},
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, document: Any) -> None:
    write(tmp_path / "store", document)
    with pytest.raises(UsageError):
        read_settings(tmp_path / "store")


def test_a_tier_without_its_address_is_named(tmp_path: Path) -> None:
    write(tmp_path / "store", {"tiers": [{"kind": "http"}]})
    folder = open_folder(tmp_path / "store")
    with pytest.raises(UsageError, match="'url'"):
        open_store(folder, "default")
    folder.close()
