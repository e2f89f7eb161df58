"""What has a name or a number in the saved process, in several clones of it at the same time."""

import asyncio

import pytest

from nagara.contract.replica import StartKind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

CLONES = 3
# A shared memory, a semaphore, a child process, a listening port of its own, and a file that
# grows all the while.
FIRST = """
import socket, subprocess, sys, time
from multiprocessing import Lock, shared_memory
segment = shared_memory.SharedMemory("nagara-test", create=True, size=4096)
segment.buf[:5] = b"saved"
lock = Lock()
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
listener = socket.create_server(("127.0.0.1", 9000))
log = open("/srv/growing.log", "a")
count = 0
def grow():
    global count
    while True:
        count += 1
        log.write(f"line {count}\\n")
        log.flush()
threading.Thread(target=grow, daemon=True).start()
time.sleep(0.2)
"""
USE = """
was = bytes(segment.buf[:5]).decode()
segment.buf[:5] = name.encode()
with lock:
    pass
again = shared_memory.SharedMemory("nagara-test")
before = os.stat("/srv/growing.log").st_size
at = count
while count < at + 10:
    time.sleep(0.001)
log.flush()
lines = open("/srv/growing.log").read().splitlines()
client = socket.create_connection(("127.0.0.1", 9000))
answer = {
    "was": was,
    "now": bytes(again.buf[:5]).decode(),
    "child": [child.pid, child.poll()],
    "grows": os.stat("/srv/growing.log").st_size > before,
    "whole": [f"line {n + 1}" for n in range(len(lines) - 1)] == lines[:-1],
}
client.close(), again.close()
"""


async def test_clones_use_the_same_names_and_numbers_and_share_none_of_it(shared):
    spec = shared.spec(
        app="names", env={"FIRST": FIRST}, command=("python", "-c", shared.spec().command[-1])
    )
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(CLONES)))
    assert [(r.kind, r.fallback) for r in reports] == [(StartKind.RESTORED, None)] * CLONES
    names = [f"name{number}" for number in range(CLONES)]
    told = await asyncio.gather(
        *(
            shared.tell(report.replica, f"name = {name!r}\n{USE}")
            for report, name in zip(reports, names, strict=True)
        )
    )
    assert [one["was"] for one in told] == ["saved"] * CLONES
    assert [one["now"] for one in told] == names
    assert len({tuple(one["child"]) for one in told}) == 1
    assert told[0]["child"][1] is None
    assert all(one["grows"] and one["whole"] for one in told)
    await shared.stop(*(report.replica for report in reports))
