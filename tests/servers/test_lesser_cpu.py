"""What a wide snapshot's libraries chose is what they choose on a CPU that really has less.

The lesser CPU is an emulated one (a Haswell: AVX2, no AVX-512), which refuses what it lacks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nagara.contract.replica import SnapshotRules, StartKind
from nagara.snapshot.facts import read_host_facts
from nagara.snapshot.levelling import LEVEL_FLAGS

from .conftest import APPS, environment

FIRST = (APPS.parent / "chosen_code.py").read_text()
CPU = "Haswell-noTSX"
# CPUID's leaf 7 as OpenSSL goes by it: the EBX bits of AVX-512.
AVX512 = sum(1 << bit for bit in (16, 17, 21, 28, 30, 31))


def emulated(folder: Path, program: str) -> Any:
    """What a Python program prints as JSON on the lesser CPU."""
    libraries = next(folder.glob("usr/lib/*-linux-gnu"))
    loader = next(Path("/lib64").glob("ld-linux-x86-64.so.2"), None)
    if loader is None:
        pytest.skip("needs x86-64")
    shown = ":".join([str(libraries), f"/usr/lib/{libraries.name}", f"/lib/{libraries.name}"])
    emulator = [str(loader), "--library-path", shown, str(folder / "usr/bin/qemu-x86_64")]
    done = subprocess.run(
        [*emulator, "-cpu", CPU, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if "error while loading shared libraries" in done.stderr:
        pytest.skip(f"the emulator does not run here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_restored_has_chosen_as_on_a_lesser_cpu(
    shared: Any, environments: Path
) -> None:
    if not read_host_facts(()).cpu_flags >= LEVEL_FLAGS | {"avx512f"}:
        pytest.skip("needs a CPU with AVX-512")
    folder = environment(environments, "qemu")
    lesser = emulated(folder, f"{FIRST}\nimport json\nprint(json.dumps(chosen()))")
    wide = SnapshotRules(is_wide=True)
    spec = shared.spec(app="wide", rules=wide, env={"HOOKS": "1", "FIRST": FIRST})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    assert report.kind is StartKind.RESTORED
    restored = await shared.tell(report.replica, "answer = chosen()")
    await shared.stop(report.replica)
    for library in ("torch", "strlen", "numpy"):
        assert restored[library] == lesser[library], library
    for chosen in (restored, lesser):
        assert not int(chosen["openssl"].rpartition(":")[2], 16) & AVX512
