"""What a replica is asked to do before it is saved and after it is put back. On the node's loop.

Before: the app's steps (requests and commands), then its processes' own functions, which give
memory back last. After: the processes first, so that environment and random generators are right
when the steps run.

Every replica has a token in a file that only its own user can read, new for each one put back: the
steps' requests carry it. An address proves nothing inside a replica, where all requests that the
gateway passes on come from loopback.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from nagara.contract.replica import HookStep, ReplicaSpec, WeightsRead
from nagara.image.identity import Identity
from nagara.node.asking import ask_step, weights_in
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.runtime import Running
from nagara.sandbox.runc import Runc, RuncError
from nagara.snapshot import hooks
from nagara.snapshot.canary import CanaryError
from nagara.snapshot.errors import SnapshotError
from nagara.snapshot.renewal import HOOK_SOCKET, call_hook

TOKEN_FILE_VARIABLE = "NAGARA_REPLICA_TOKEN_FILE"  # noqa: S105 - the name of a variable
TOKEN_FILE = HOOK_SOCKET.with_name("token")  # inside
PYTHON_FOLDER = HOOK_SOCKET.with_name("python")  # inside
SECRETS_FOLDER = HOOK_SOCKET.with_name("secrets")  # inside: a file for each
_STEP_S = 120.0
_BEFORE_S, _AFTER_S = 120.0, 30.0

# Python imports a module of this name at its start; the one of the environment comes after it.
_SITE = """\
import importlib.machinery, importlib.util, os, sys
import nagara_hooks
try:
    nagara_hooks.listen()
except OSError as error:
    sys.stderr.write(f"nagara: no snapshot hooks in process {os.getpid()}: {error}\\n")
_here = os.path.dirname(__file__)
_rest = [entry for entry in sys.path if entry != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _rest)
if _spec is not None:
    _next = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_next)
"""


def write_hook_files(upper: Path, spec: ReplicaSpec, who: Identity, *, is_new: bool) -> None:
    """Puts a fresh token and the secrets into a replica's layer and, into that of a plainly
    started one, what its Python processes need to listen. All of it is the replica's user's."""
    token = upper / TOKEN_FILE.relative_to("/")
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    for name, value in spec.secrets:
        file = upper / SECRETS_FOLDER.relative_to("/") / name
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(value)
    if is_new and spec.hooks.in_python:
        folder = upper / PYTHON_FOLDER.relative_to("/")
        folder.mkdir()
        (folder / "nagara_hooks.py").write_bytes(Path(hooks.__file__).read_bytes())
        (folder / "sitecustomize.py").write_text(_SITE)
    if who.uid or who.gid:
        for path in (token.parent, *token.parent.rglob("*")):
            os.chown(path, who.uid, who.gid, follow_symlinks=False)


def hook_environment(spec: ReplicaSpec, own: dict[str, str]) -> dict[str, str]:
    """What a replica's environment has for its hooks; `own` is what the app sets itself."""
    env = {hooks.SOCKET_VARIABLE: str(HOOK_SOCKET), TOKEN_FILE_VARIABLE: str(TOKEN_FILE)}
    if spec.hooks.in_python:
        paths = [str(PYTHON_FOLDER), own.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = ":".join(path for path in paths if path)
    return env


async def before_snapshot(
    runc: Runc, folder: ReplicaFolder, running: Running, spec: ReplicaSpec
) -> None:
    """Raises `SnapshotError` when a hook fails."""
    await _carry_out(runc, folder, running, spec.hooks.before)
    request = {"do": "before_snapshot"}
    await asyncio.to_thread(call_hook, running.pid, request, timeout_s=_BEFORE_S)


async def renew(folder: ReplicaFolder, running: Running, env: dict[str, str]) -> None:
    """What the processes of a replica put back do themselves; `env` is the app's own.

    Raises:
        SnapshotError: a hook fails.
    """
    request = {"do": "after_restore", "replica": folder.name, "env": env}
    await asyncio.to_thread(call_hook, running.pid, request, timeout_s=_AFTER_S)


async def wake(
    runc: Runc, folder: ReplicaFolder, running: Running, spec: ReplicaSpec
) -> WeightsRead | None:
    """The steps after that: a server takes up its device and its weights. What it says of the
    latter. Raises `SnapshotError` when a step fails."""
    answers = await _carry_out(runc, folder, running, spec.hooks.after)
    return next((read for answer in answers if (read := weights_in(answer))), None)


async def _carry_out(
    runc: Runc, folder: ReplicaFolder, running: Running, steps: Sequence[HookStep]
) -> list[bytes]:
    """What the requests among the steps were answered with."""
    answers: list[bytes] = []
    if not steps:
        return answers
    token = (folder.upper / TOKEN_FILE.relative_to("/")).read_text()
    for step in steps:
        try:
            if step.command:
                await asyncio.to_thread(runc.exec, folder.name, step.command, time_limit_s=_STEP_S)
            else:
                answers.append(await ask_step(running.port, step, token, _STEP_S))
        except CanaryError as error:
            raise SnapshotError(f"a hook failed: {error}") from error
        except RuncError as error:
            raise SnapshotError(f"the hook {step.command[0]} failed: {error.what}") from error
    return answers
