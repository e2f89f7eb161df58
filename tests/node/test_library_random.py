"""Clones of a program whose C library keeps a random generator of its own in memory.

Since 2.41 glibc draws in the process, from state that the kernel's vDSO tells when to renew. The
C library tried here is the newer one beside nagara's own CRIU.
"""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from nagara.contract.replica import Canary, StartKind

pytestmark = pytest.mark.root

SOURCE = Path(__file__).parent.parent / "apps/draws.c"
CLONES, ROUNDS = 4, 3


@pytest.fixture
def program(state_dir, tmp_path):
    """The command of the program, under the newer C library, in a folder of its own."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    libraries = list((state_dir / "tools/criu/usr/lib").glob("*/libc.so.6"))
    if compiler is None or not libraries:
        pytest.skip("needs a C compiler, and the C library of nagara's own CRIU")
    folder = tmp_path / "draws"
    folder.mkdir()
    (loader,) = libraries[0].parent.glob("ld-linux-*.so.*")
    for file in (libraries[0], loader):
        shutil.copy(file.resolve(), folder / file.name)
    subprocess.run([compiler, "-O1", "-o", folder / "draws", SOURCE], check=True)
    return (str(folder / loader.name), "--library-path", str(folder), str(folder / "draws"))


async def test_clones_draw_different_bytes(make_yard, tools, program, monkeypatch):
    yard = make_yard()
    monkeypatch.syspath_prepend(Path(program[-1]).parent)  # so that replicas see it
    try:
        await yard.open()
        spec = yard.spec(app="draws", command=(*program, "${PORT}"), canary=Canary("/"))
        assert (await yard.capture(spec)).reason is None
        plain = await yard.start(yard.spec(app="plain", command=spec.command, canary=spec.canary))
        pid = (yard.state / "node/replicas" / plain.replica / "pid").read_text()
        flags = Path(f"/proc/{int(pid)}/smaps").read_text()
        await yard.stop(plain.replica)
        if not any(" dp" in line for line in flags.splitlines() if line.startswith("VmFlags")):
            pytest.skip("needs a kernel and a C library that draw in the process")
        drawn = []
        for _ in range(ROUNDS):
            reports = await asyncio.gather(*(yard.start(spec) for _ in range(CLONES)))
            assert [(r.kind, r.fallback) for r in reports] == [(StartKind.RESTORED, None)] * CLONES
            replicas = [report.replica for report in reports]
            drawn += await asyncio.gather(*(yard.ask(replica, "/draw") for replica in replicas))
            await yard.stop(*replicas)
        assert {len(answer.body) for answer in drawn} == {32}
        assert len({answer.body for answer in drawn}) == CLONES * ROUNDS
    finally:
        await yard.close()
        assert yard.leftovers() == []
        yard.force_away()
