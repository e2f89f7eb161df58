"""The image of the chaos run's app: Python and what the app imports, in a tier of its own.

A machine that has that tier fetches what its replicas read through its file daemon, which so is
one of the things that can be killed. Nothing is downloaded: packages are copied from the
environment that this runs in.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

NAME = "chaos"
_NEEDED = "aiohttp"


def make_image(folder: Path) -> Path:
    """Makes the image below `folder`; the tier that has it.

    Raises SystemExit with what went wrong.
    """
    environment, tier, state = folder / "venv", folder / "tier", folder / "importing"
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in _closure(_NEEDED):
        _copy(name, packages)
    tier.mkdir()
    write_tier(state, tier)
    nagara = (sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state))
    _run(*nagara, "image", "import", f"venv:{environment}", "--name", NAME)
    _run(*nagara, "store", "push", f"images/{NAME}", "--to", "chaos")
    shutil.rmtree(state)
    shutil.rmtree(environment)  # it must come from the image
    return tier


def write_tier(state: Path, tier: Path) -> None:
    """Settings of a store that has the tier."""
    (state / "store").mkdir(parents=True, exist_ok=True)
    tiers = [{"kind": "folder", "name": "chaos", "path": str(tier)}]
    (state / "store/settings.json").write_text(json.dumps({"tiers": tiers}))


def _closure(name: str) -> set[str]:
    """A distribution and all that it requires and that is here."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(PackageNotFoundError):  # of another version of Python
            lines = [] if one in found else distribution(one).requires or []
            found.add(one)
            needed = (line for line in lines if "extra ==" not in line)
            waiting += [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in needed]
    return found


def _copy(name: str, packages: Path) -> None:
    for file in distribution(name).files or ():
        target = (packages / str(file)).resolve()
        if target.is_relative_to(packages.resolve()) and "__pycache__" not in target.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), target)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
