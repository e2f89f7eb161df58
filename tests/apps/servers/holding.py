"""A server that holds what is delicate to save: locks, a database at rest, an inotify on tmpfs.

`/rows` are those of the database, `/write` adds one; `/other` is what a second process is told
when it wants the lock, which `/release` gives up; `/event` is what the inotify reports of a new
file.
"""

import ctypes
import fcntl
import http.server
import multiprocessing
import os
import sqlite3
import sys
from pathlib import Path

WATCHED = b"/dev/shm"


def other_process(pipe):
    """Tries to get the lock whenever it is asked; a process of its own, so that locks count."""
    mine = os.open("/srv/lock", os.O_CREAT | os.O_RDWR)
    while True:
        pipe.recv()
        try:
            fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(mine, fcntl.LOCK_UN)
            pipe.send("free")
        except OSError:
            pipe.send("held")


mine, theirs = multiprocessing.Pipe()
if os.fork() == 0:  # before the database is opened: it has one user
    other_process(theirs)

database = sqlite3.connect("/srv/holding.db", isolation_level=None, check_same_thread=False)
database.execute("PRAGMA journal_mode = WAL")
database.execute("CREATE TABLE notes (text TEXT)")
database.execute("INSERT INTO notes VALUES ('before')")
lock = os.open("/srv/lock", os.O_CREAT | os.O_RDWR)
fcntl.lockf(lock, fcntl.LOCK_EX)

libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, WATCHED, 0x100) >= 0  # IN_CREATE


def event():
    new = Path(f"/dev/shm/new-{os.getpid()}")
    new.touch()
    new.unlink()
    return os.read(watch, 4096)[16:].split(b"\0")[0].decode()


def other():
    mine.send("write")
    return mine.recv()


def release():
    fcntl.lockf(lock, fcntl.LOCK_UN)
    return "released"


def write():
    database.execute("INSERT INTO notes VALUES ('after')")
    return "written"


def rows():
    return repr(sorted(row[0] for row in database.execute("SELECT text FROM notes")))


ANSWERS = {
    "/": lambda: "ready",
    "/rows": rows,
    "/write": write,
    "/other": other,
    "/release": release,
    "/event": event,
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = ANSWERS[self.path]().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
