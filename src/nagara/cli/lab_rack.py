"""The machines of a laboratory as four programs of a `command` provider:

    python -m nagara.cli.lab_rack FILE VERB      VERB: offerings, launch, release, machines

FILE is JSON: {"devices": 2, "addresses": ["tcp://...", ...], "launched": {name: address}}. The
machines' agents run already; launching one gives it a name, releasing takes the name away.
"""

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

from nagara.base.durable import write_durably
from nagara.pool.providers.command import NO_CAPACITY

REGION = "laboratory"


def write_rack(file: Path, addresses: list[str], devices: int) -> None:
    """A rack of which nothing is launched yet."""
    _write(file, {"devices": devices, "addresses": addresses, "launched": {}})


def _write(file: Path, rack: dict[str, Any]) -> None:
    write_durably(file, json.dumps(rack).encode())


def _launch(rack: dict[str, Any], name: str) -> bool:
    taken = rack["launched"]
    free = [each for each in rack["addresses"] if each not in taken.values()]
    if name not in taken:
        if not free:
            return False
        taken[name] = free[0]
    return True


def main() -> int:
    file, verb = Path(sys.argv[1]), sys.argv[2]
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rack: dict[str, Any] = json.loads(file.read_bytes())
        if verb == "offerings":
            kind = {"id": "machine", "region": REGION, "type": "cpu", "price_h": 1.0}
            print(json.dumps([{**kind, "devices": rack["devices"]}]))
        elif verb == "machines":
            launched = rack["launched"].items()
            print(
                json.dumps([{"name": n, "offering": "machine", "address": a} for n, a in launched])
            )
        elif verb == "launch":
            if not _launch(rack, json.load(sys.stdin)["name"]):
                return NO_CAPACITY
            _write(file, rack)
        else:
            rack["launched"].pop(json.load(sys.stdin)["name"], None)
            _write(file, rack)
    return 0


if __name__ == "__main__":
    sys.exit(main())
