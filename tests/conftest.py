"""What several rooms' tests need of the machine; a skip names what is missing.

`make test` prepares all of it below `.state/`; `NAGARA_STATE` names another place.
"""

import contextlib
import os
from pathlib import Path

# Torch's compiler imports setuptools, which refuses to be the second after Python's own distutils.
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

import pytest

from nagara.engine.openmp import be_patient
from nagara.image.models import ModelFolder, UnknownModelError, find_model
from nagara.sandbox.tools import Tools, find_tools

# Nothing is looked up on a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before anything imports torch: on a busy machine its waiting threads would take minutes.
be_patient()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--depth-oracle",
        action="store_true",
        help="list the engine's cases that ran at depth 0, the oracle, and at depth 1",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_root = os.geteuid() == 0
    has_gpu = Path("/dev/nvidia0").exists()
    for item in items:
        if item.get_closest_marker("root") and not is_root:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def state_dir() -> Path:
    """The prepared state folder: `models` and `tools` are in it. Tests do not write there."""
    named = os.environ.get("NAGARA_STATE")
    return Path(named) if named else Path(__file__).parent.parent / ".state"


@pytest.fixture(scope="session")
def smollm2(state_dir: Path) -> ModelFolder:
    """The real model."""
    try:
        return find_model(state_dir / "models", "smollm2")
    except UnknownModelError:
        pytest.skip("needs the model: nagara --state .state models add smollm2")


@pytest.fixture(scope="session")
def tools(state_dir: Path) -> Tools:
    """runc and CRIU, both usable."""
    found = find_tools(state_dir / "tools")
    if found.missing:
        pytest.skip("needs " + "; ".join(found.missing))
    return found
