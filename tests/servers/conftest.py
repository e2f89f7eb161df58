"""Real servers, each in an environment of its own: `make test-servers`, not `make test`.

The environments are made by `scripts/environments.py`; what is missing skips its tests with the
reason. Fixtures are those of the tests of a node and of the whole.
"""

import os
from pathlib import Path

import pytest

from nagara.image.host import HostImage

from ..node.conftest import make_yard, shared  # noqa: F401
from ..whole.conftest import up  # noqa: F401

APPS = Path(__file__).parent.parent / "apps/servers"
if not os.environ.get("NAGARA_SERVERS"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def environments(state_dir: Path) -> Path:
    """The folder with the servers' environments, in a place that replicas see."""
    named = os.environ.get("NAGARA_ENVIRONMENTS")
    folder = Path(named) if named else state_dir.resolve() / "environments"
    hidden = HostImage(state=Path("/nowhere"), needed=(folder,)).bound_folders()
    if hidden:
        pytest.skip(f"replicas do not see {folder}: name another with NAGARA_ENVIRONMENTS")
    return folder


def environment(folder: Path, name: str) -> Path:
    """One environment; skips where it could not be made."""
    if not (folder / name / ".ready").exists():
        reason = folder / f"{name}.failed"
        why = reason.read_text().strip() if reason.exists() else "it was not made"
        pytest.skip(f"needs the environment {name} (scripts/environments.py {name}): {why}")
    return folder / name
