from pathlib import Path

import pytest

from nagara.pool.errors import PoolFileError
from nagara.pool.poolfile import open_providers, own_slots, plan_of_file, read_pool_file

GOOD = """
[pool]
service = 0.99
utilisation = 0.7
spare_machines = 0

[provider.here]
kind = "local"
slots = 4

[provider.rack]
kind = "command"
offerings = ["./offerings", "--all"]
launch = ["launch-it"]
release = ["release-it"]
machines = ["list-them"]
ramp = 5

[[demand]]
slots = 2
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "pool.toml"
    path.write_text(text)
    return path


def test_a_pool_file_is_read_whole(tmp_path: Path) -> None:
    file = read_pool_file(written(tmp_path, GOOD))
    assert file.policy.service == 0.99
    assert file.policy.spare_machines == 0
    assert file.policy.ramps == (("rack", 5),)
    assert own_slots(file) == 4
    assert [one.name for one in open_providers(file)] == ["rack"]
    assert file.demands[0].slots == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pool]\nservice = 2", "pool.service must be a number from 0.5 to 0.9999"),
        ("[pool]\nutilisation = 0.95", "from 0.65 to 0.8"),
        ("[pool]\nleast_free = true", "pool.least_free"),
        ("[pool]\nsevice = 0.9", "pool.sevice is not a key"),
        ("[poll]", "poll is not a key"),
        ("[provider.x]\nkind = 'cloud'", "one of: local, command, skypilot"),
        ("[provider.x]\nkind = 'local'", "provider.x.slots"),
        ("[provider.x]\nkind = 'local'\nslots = 0", "provider.x.slots"),
        (
            "[provider.x]\nkind = 'local'\nslots = 1\n[provider.y]\nkind = 'local'\nslots = 1",
            "only once",
        ),
        ("[provider.x]\nkind = 'command'\nofferings = 'ls'", "provider.x.offerings must be a list"),
        ("[[demand]]\nslots = 'two'", "demand.slots"),
        ("[[demand]]\nslots = 1\ntypes = [1]", "demand.types"),
        ("a = ", "no TOML"),
    ],
)
def test_a_fault_names_the_key_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PoolFileError) as caught:
        read_pool_file(written(tmp_path, text))
    assert message in str(caught.value)
    assert "pool.toml" in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(PoolFileError, match="cannot be read"):
        read_pool_file(tmp_path / "nowhere.toml")


async def test_a_plan_of_a_file_says_what_and_why(tmp_path: Path) -> None:
    text = "[provider.here]\nkind = 'local'\nslots = 4\n[[demand]]\nslots = 2\n"
    plan = await plan_of_file(read_pool_file(written(tmp_path, text)), tmp_path)
    assert plan["launches"] == [["local", 1]]
    assert any("Launch 1 machine of any at local local" in line for line in plan["words"])
