"""The house's rules that `lint-imports` itself cannot see."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = sorted(path.parent.name for path in (ROOT / "src/nagara").glob("*/__init__.py"))
PURE = (
    "nagara.engine.scheduler",
    "nagara.engine.blocks",
    "nagara.image.index",
    "nagara.image.fuse_wire",
    "nagara.snapshot.variant",
    "nagara.snapshot.states",
    "nagara.pool.planner",
    "nagara.control.autoscaler",
)


def contracts() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_contract_of_its_own(room: str) -> None:
    contract = contracts()[f"importlinter:contract:{room}"]
    assert contract["type"] == "forbidden"
    assert contract["source_modules"].split() == [f"nagara.{room}"]


def test_pure_modules_are_under_the_contract_of_purity_as_soon_as_they_exist() -> None:
    existing = {
        name for name in PURE if (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists()
    }
    assert existing <= set(contracts()["importlinter:contract:pure"]["source_modules"].split())


def loaded_after(statement: str) -> set[str]:
    """The modules a fresh interpreter holds after `statement`, by their top names."""
    script = f"import sys\n{statement}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_importing_the_package_loads_nothing_else() -> None:
    ours = {name for name in loaded_after("import nagara") if name.startswith("nagara")}
    assert ours == {"nagara"}


def test_the_help_of_the_command_loads_no_library_but_its_own() -> None:
    loaded = loaded_after(
        "from nagara.cli.main import main\nmain(['--help'], standalone_mode=False)"
    )
    assert not loaded & {"torch", "transformers", "numpy", "aiohttp", "pydantic", "asyncio"}
