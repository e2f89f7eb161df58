"""A PostgreSQL server of the test's own, from Debian's packages, reached by a Unix socket."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 60.0
USER = "postgres"  # the server refuses to run as root


def programs() -> Path | None:
    """The folder of the newest server's programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


needs_postgres = pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")


class PostgresServer:
    """A running server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"postgresql:///postgres?host={folder}&user={USER}"
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Starts it and waits until it takes connections."""
        found = programs()
        assert found is not None
        command = [str(found / "postgres"), "-D", str(self.folder / "data")]
        command += ["-k", str(self.folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **_as_user()
            )
        deadline_s = time.monotonic() + START_S
        check = [str(found / "pg_isready"), "-q", "-h", str(self.folder)]
        while subprocess.run(check, check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline_s, "PostgreSQL did not start"
            time.sleep(0.05)

    def end(self) -> None:
        """Ends it at once; what was committed stays."""
        if self._process is not None:
            self._process.send_signal(3)  # SIGQUIT: without waiting for clients
            self._process.wait(START_S)
            self._process = None


def _as_user() -> dict[str, object]:
    return {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A new, empty server; everything of it is gone afterwards."""
    found = programs()
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="nagara-pg-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, USER, USER)
        subprocess.run(
            [str(found / "initdb"), "-D", str(folder / "data"), "-U", USER, "-A", "trust",
             "-E", "UTF8", "--no-sync"],
            check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=folder,
            **_as_user(),
        )  # fmt: skip
        server = PostgresServer(folder)
        server.begin()
        try:
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(folder)
