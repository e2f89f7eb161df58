"""Snapshots for lesser CPUs: what the libraries in the saved process chose, and where it fits."""

import dataclasses
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from nagara.contract.replica import SnapshotRules, StartKind
from nagara.snapshot.facts import read_host_facts
from nagara.snapshot.levelling import LEVEL_FLAGS, LEVEL_VARIABLE

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

APPS = Path(__file__).parent.parent / "apps"

FIRST = (APPS / "chosen_code.py").read_text()
CHOSEN = "answer = chosen()"
# A register that stays in use while the thread is scheduled away.
USES_AVX512 = """
import ctypes, mmap, time
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("62a37d4025c0ff" "c3"))  # vpternlogd zmm16, zmm16, zmm16, 255; ret
use = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
def go_on():
    while True:
        use()
        time.sleep(0.001)
threading.Thread(target=go_on, daemon=True).start()
time.sleep(0.2)
"""
WIDE = SnapshotRules(is_wide=True)


@pytest.fixture(scope="module")
def facts():
    """This host, which must have more than the level."""
    facts = read_host_facts(())
    if not facts.cpu_flags >= LEVEL_FLAGS | {"avx512f", "avx512bw", "avx512vl"}:
        pytest.skip("needs a CPU with AVX-512")
    return facts


@contextmanager
def host_without(yard, facts, *flags, smaller_by=1024):
    """As if the node ran on a CPU without these."""
    snapshots = yard.node._snapshots
    real = snapshots._facts
    snapshots._facts = dataclasses.replace(
        real,
        cpu_flags=frozenset(
            flag for flag in facts.cpu_flags if not flag.startswith(flags) or flag in LEVEL_FLAGS
        ),
        signal_frame_bytes=real.signal_frame_bytes - smaller_by,
    )
    yield
    snapshots._facts = real


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide(shared, facts):
    """An app with a wide snapshot."""
    spec = shared.spec(app="wide", rules=WIDE, env={"HOOKS": "1", "FIRST": FIRST})
    assert (await shared.capture(spec)).reason is None
    return spec


async def chosen_in(yard, spec):
    """How a replica was started, and what its libraries chose."""
    report = await yard.start(spec)
    chosen = await yard.tell(report.replica, CHOSEN)
    await yard.stop(report.replica)
    return report.kind, chosen


def second_word(openssl):
    """CPUID's leaf 7 as OpenSSL goes by it: EBX, and ECX above it."""
    return int(openssl.rpartition(":")[2], 16)


async def test_libraries_in_a_wide_snapshot_chose_what_lesser_cpus_have(shared, wide):
    kind, levelled = await chosen_in(shared, wide)
    assert kind is StartKind.RESTORED
    kind, own = await chosen_in(shared, dataclasses.replace(wide, snapshot=False))
    assert kind is StartKind.PLAIN
    assert (levelled["torch"], own["torch"]) == ("AVX2", "AVX512")
    assert levelled["strlen"] != own["strlen"]
    assert levelled["numpy"] == []
    assert "X86_V4" in own["numpy"] or own["numpy"] == []  # older releases have other names
    avx512f = 1 << 16
    assert second_word(own["openssl"]) & avx512f
    assert not second_word(levelled["openssl"]) & avx512f


async def test_a_wide_snapshot_needs_the_level_and_no_more(shared, wide, facts):
    with host_without(shared, facts, "avx512", "amx", "vaes", "gfni", "sha_ni", "xsavec"):
        kind, _ = await chosen_in(shared, wide)
        assert kind is StartKind.RESTORED
    with host_without(shared, facts, "aes"):
        report = await shared.start(wide)
        assert (report.kind, report.capture_wanted) == (StartKind.PLAIN, True)
        assert report.fallback == "no variant fits: this CPU lacks aes"
        await shared.stop(report.replica)


async def test_an_ordinary_snapshot_needs_all_that_its_cpu_has(shared, facts):
    spec = shared.spec(app="ordinary")
    assert (await shared.capture(spec)).reason is None
    with host_without(shared, facts, "avx512"):
        report = await shared.start(spec)
        assert (report.kind, report.capture_wanted) == (StartKind.PLAIN, True)
        assert "this CPU lacks avx512" in report.fallback
        await shared.stop(report.replica)


async def test_the_richer_variant_is_taken_where_both_fit(shared, wide, facts):
    spec = dataclasses.replace(wide, app="both")
    assert (await shared.capture(spec)).reason is None
    (levelled,) = shared.node._snapshots.catalog.all_of("default", "both", key(shared, spec))
    with ordinary_captures(shared):
        assert (await shared.capture(spec)).reason is None
    kind, chosen = await chosen_in(shared, spec)
    assert (kind, chosen["torch"]) == (StartKind.RESTORED, "AVX512")
    with host_without(shared, facts, "avx512"):
        report = await shared.start(spec)
        assert report.snapshot == levelled.name
        await shared.stop(report.replica)


def key(yard, spec):
    return yard.node._snapshots.key(spec)


@contextmanager
def ordinary_captures(yard):
    """As on a host that has not all of the level."""
    yard.node._runtime._can_level = False
    yield
    yard.node._runtime._can_level = True


async def test_what_uses_more_all_the_same_is_saved_for_this_cpu_alone(shared, facts, caplog):
    spec = shared.spec(app="unbent", rules=WIDE, env={"FIRST": USES_AVX512})
    if not Path("/proc/self/arch_status").exists():
        pytest.skip("needs a kernel that tells who used AVX-512")
    assert (await shared.capture(spec)).reason is None
    (snapshot,) = shared.node._snapshots.catalog.all_of("default", "unbent", key(shared, spec))
    assert not snapshot.record.variant.is_levelled
    assert snapshot.record.variant.cpu_flags == facts.cpu_flags
    assert "AVX-512 was used all the same by python" in caplog.text


async def test_only_a_replica_that_is_to_be_saved_is_told_to_use_less(shared):
    code = f"answer = [os.environ.get('{LEVEL_VARIABLE}'), os.environ.get('ATEN_CPU_CAPABILITY')]"
    spec = shared.spec(app="told", rules=WIDE, env={"ATEN_CPU_CAPABILITY": "default"})
    report = await shared.start(spec)
    assert await shared.tell(report.replica, code) == [None, "default"]
    await shared.stop(report.replica)
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    level, own = await shared.tell(report.replica, code)
    await shared.stop(report.replica)
    assert own == "default"  # the app's own choice stays
    assert level == ("x86-64-v3" if read_host_facts(()).cpu_flags >= LEVEL_FLAGS else None)
