"""A restored replica whose memory is not what was saved never serves: its canary says so.

The server is not ours, is ready, and answers 200: only the body it gives is wrong.
"""

from pathlib import Path

import pytest

from nagara.contract.replica import StartKind
from nagara.control.appfile import parse_apps
from nagara.snapshot.processes import processes_of

from ..whole.foreign import SERVERS

SAID, WRONG = b"ready", b"raedy"


def overwrite(pid: int, old: bytes, new: bytes) -> int:
    """Replaces `old` in all writable memory of a process; returns how often."""
    count = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, *_ = line.split(maxsplit=5)
        if not rights.startswith("rw") or line.endswith(("[vvar]", "[vsyscall]")):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            content = memory.read(end - begin)
            at = content.find(old)
            while at >= 0:
                memory.seek(begin + at)
                memory.write(new)
                count += 1
                at = content.find(old, at + len(old))
    return count


@pytest.mark.root
@pytest.mark.parametrize("server", SERVERS[:2], ids=lambda server: server.name)
async def test_a_restored_server_with_corrupted_memory_is_refused_and_started_plainly(
    yard, server, monkeypatch
):
    if not server.is_there:
        pytest.skip(f"needs {server.program}")
    (app,) = parse_apps(server.app(), "app.toml")
    spec = yard.spec(
        app=server.name, command=app.command, ready_path=app.ready, canary=app.canary, env={}
    )
    assert (spec.canary.path, spec.canary.body) == ("/", None)
    assert (await yard.capture(spec)).reason is None
    sound = await yard.start(spec)
    assert (sound.kind, sound.fallback) == (StartKind.RESTORED, None)
    runtime = yard.node._runtime
    restore = runtime.restore
    hits = 0

    async def restore_and_corrupt(*arguments):
        nonlocal hits
        running = await restore(*arguments)
        done: set[int] = set()
        while new := set(processes_of(running.pid)) - done:  # one may be forking another
            hits += sum(overwrite(pid, SAID, WRONG) for pid in new)
            done |= new
        return running

    monkeypatch.setattr(runtime, "restore", restore_and_corrupt)
    report = await yard.start(spec)
    assert hits
    assert report.kind is StartKind.PLAIN
    assert "the canary answered '200 raedy' instead of '200 ready'" in report.fallback
    assert (await yard.ask(report.replica)).body == SAID
    assert (await yard.ask(sound.replica)).body == SAID  # a clone beside it is untouched
    await yard.stop(sound.replica, report.replica)
