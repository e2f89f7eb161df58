"""An own Ray head on this machine, for who has no Ray cluster yet.

It goes on when nagara ends or is killed: the other machines would have to join anew otherwise.
`ray stop` ends it. Its watch over machines is much closer than Ray's own: one that is cut off is
known to be gone within about three seconds instead of a minute. Ray tells its makers nothing.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from nagara.base.durable import write_durably
from nagara.base.errors import NagaraError
from nagara.node.network.address import split_address

_START_S = 120.0
_SAID_CHARS = 1000

_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def own_head(state: Path, port: int) -> str:
    """The address of this machine's head, which is started if there is none. Blocking.

    Raises:
        NagaraError: it does not start; with what Ray says.
    """
    file = state / "ray-head"
    known = file.read_text().strip() if file.exists() else ""
    if known and _listens(known):
        return known
    command = [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
        *("--include-dashboard=false", "--disable-usage-stats"),
    ]
    # Its actor here, which nagara does not use, is to find this folder, too.
    environment = {**os.environ, **_SETTINGS, "NAGARA_STATE": str(state)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_START_S, env=environment, check=False,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NagaraError(f"Ray's head has not started within {_START_S:g} s") from error
    found = re.search(r"--address='([^']+)'", done.stdout)
    if done.returncode != 0 or found is None:
        said = (done.stderr + done.stdout).strip()[-_SAID_CHARS:]
        raise NagaraError(
            f"Ray's head does not start: {said}",
            hint="if one runs here already, give its address: nagara up --cluster HOST:PORT",
        )
    write_durably(file, found[1].encode())
    return found[1]


def _listens(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=2.0).close()
    except OSError:
        return False
    return True
