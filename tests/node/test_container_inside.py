"""What a replica in a container sees of the machine and may do to it."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from nagara.contract.replica import Limits, StartKind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


class Inside:
    """One replica and its node."""

    def __init__(self, yard, report):
        self.yard, self.report = yard, report

    async def __call__(self, code):
        return await self.yard.tell(self.report.replica, code)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inside(shared):
    spec = shared.spec(limits=Limits(cpu=1.5, memory_bytes=256 << 20))
    report = await shared.start(spec)
    assert report.kind is StartKind.PLAIN
    yield Inside(shared, report)
    await shared.stop(report.replica)


async def test_io_uring_is_answered_with_enosys(inside):
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(425, 8, ctypes.create_string_buffer(256))
answer = errno.errorcode[ctypes.get_errno()]
"""
    assert await inside(code) == "ENOSYS"


async def test_kernel_keyrings_and_perf_are_refused(inside):
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
answer = []
for number in (250, 298, 321, 323):
    libc.syscall(number, 0, 0, 0, 0, 0)
    answer.append(errno.errorcode[ctypes.get_errno()])
"""
    assert await inside(code) == ["EPERM"] * 4


async def test_no_user_namespace_gives_capabilities_back(inside):
    code = """
import ctypes, errno, signal
libc = ctypes.CDLL(None, use_errno=True)
answer = []
new_user, new_everything = 0x10000000, 0x7E020000
for flags in (new_user, new_everything):
    libc.unshare(flags)
    answer.append(errno.errorcode[ctypes.get_errno()])
libc.syscall(56, new_user | signal.SIGCHLD, 0, 0, 0, 0)
answer.append(errno.errorcode[ctypes.get_errno()])
libc.syscall(435, ctypes.create_string_buffer(88), 88)
answer.append(errno.errorcode[ctypes.get_errno()])
"""
    assert await inside(code) == ["EPERM", "EPERM", "EPERM", "ENOSYS"]


async def test_sockets_that_leave_the_network_namespace_are_refused(inside):
    code = """
import errno, socket
answer = []
for family in (socket.AF_VSOCK, socket.AF_ALG):
    try:
        socket.socket(family, socket.SOCK_SEQPACKET if family == socket.AF_ALG else 1).close()
        answer.append("made")
    except OSError as error:
        answer.append(errno.errorcode[error.errno])
"""
    assert await inside(code) == ["EAFNOSUPPORT"] * 2


async def test_threads_and_processes_are_bounded(inside):
    """A replica that forks without end leaves the machine's pids to others."""
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    groups = Path("/sys/fs/cgroup")
    name = inside.yard.node._replicas[inside.report.replica].folder.control_group
    (limit,) = (path.read_text() for path in groups.glob(f"**/nagara/{name}/pids.max"))
    assert int(limit) == min(32768, pid_max // 8)


async def test_capabilities_are_few_and_no_new_ones_can_be_got(inside):
    status = await inside("answer = open('/proc/self/status').read()")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    # chown, fowner, kill, setgid, setuid, net_bind_service
    assert int(lines["CapEff"], 16) == int(lines["CapBnd"], 16) == 0b0100_1110_1001
    assert int(lines["CapAmb"], 16) == int(lines["CapInh"], 16) == 0
    assert lines["NoNewPrivs"].strip() == "1"
    assert lines["Seccomp"].strip() == "2"


async def test_mounting_and_changing_the_clock_are_refused(inside):
    code = """
import ctypes, errno, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(b"none", b"/mnt", b"tmpfs", 0, b"")
answer = [errno.errorcode[ctypes.get_errno()]]
try:
    time.clock_settime(time.CLOCK_REALTIME, 0)
except PermissionError:
    answer.append("EPERM")
"""
    assert await inside(code) == ["EPERM", "EPERM"]


async def test_namespaces_are_its_own(inside):
    code = """
import os
kinds = ("pid", "mnt", "ipc", "uts", "net")
answer = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}
"""
    theirs = await inside(code)
    ours = {kind: str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in theirs}
    assert not set(theirs.items()) & set(ours.items())


async def test_the_network_is_loopback_alone_and_up(inside):
    code = """
import os, socket
answer = [os.listdir("/sys/class/net"), open("/sys/class/net/lo/flags").read().strip()]
"""
    interfaces, flags = await inside(code)
    assert interfaces == ["lo"]
    assert int(flags, 16) & 1
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", 8000), timeout=1):
        pass  # the same port of the machine itself is another one


async def test_shared_memory_is_private(inside):
    await inside("open('/dev/shm/theirs', 'w').write('x')")
    assert not Path("/dev/shm/theirs").exists()
    mine = Path(f"/dev/shm/{inside.yard.prefix}")
    mine.touch()
    try:
        assert await inside("import os; answer = os.listdir('/dev/shm')") == ["theirs"]
    finally:
        mine.unlink()


async def test_its_process_is_the_first_and_the_host_name_its_own(inside):
    answer = await inside("import os, socket; answer = [os.getpid(), socket.gethostname()]")
    assert answer == [1, inside.report.replica]


async def test_secrets_of_the_machine_are_not_visible(inside):
    state = inside.yard.state.resolve()
    mine = Path("/tmp", inside.yard.prefix)
    mine.touch()
    hidden = (
        "/etc/shadow",
        "/etc/gshadow",
        "/etc/shadow-",
        "/root/.ssh",
        "/root/.bashrc",
        str(mine),
    )
    code = f"""
import os
answer = [path for path in {hidden!r} if os.path.exists(path)]
answer += os.listdir({str(state)!r}) if os.path.exists({str(state)!r}) else []
answer += [name for name in os.listdir("/run") if name != "nagara"]
"""
    try:
        assert await inside(code) == []
    finally:
        mine.unlink()
    assert await inside("import os; answer = os.path.exists('/etc/passwd')")


async def test_folders_that_are_bound_in_are_visible_and_read_only(inside):
    code = f"""
import os, sys
answer = [os.path.exists({sys.prefix!r} + "/pyvenv.cfg"), None]
try:
    open({sys.prefix!r} + "/written", "w")
except OSError as error:
    answer[1] = error.strerror
"""
    seen, refusal = await inside(code)
    assert seen
    bound = inside.yard.node._runtime.trees.machine_folders(inside.yard.spec())
    if any(Path(sys.prefix).is_relative_to(folder) for folder in bound):
        assert refusal == "Read-only file system"
    assert not Path(sys.prefix, "written").exists()


async def test_what_it_writes_stays_in_its_own_layer(inside):
    name = f"/usr/local/{inside.yard.prefix}"
    await inside(f"open({name!r}, 'w').write('x')")
    assert not Path(name).exists()


async def test_devices_of_the_machine_cannot_be_made_or_opened(inside):
    code = """
import os, stat
answer = sorted(os.listdir("/dev"))
try:
    os.mknod("/dev/disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))
    open("/dev/disk", "rb")
except OSError as error:
    answer = [answer, error.strerror]
"""
    listing, refusal = await inside(code)
    assert refusal == "Operation not permitted"
    assert {"null", "urandom", "shm"} <= set(listing)
    assert not {"vda", "sda", "kvm", "fuse", "mem"} & set(listing)


async def test_limits_are_set_on_its_control_groups(inside):
    mount, own = Path("/sys/fs/cgroup"), f"nagara/*-{inside.report.replica}"
    groups = [*mount.glob(own), *mount.glob(f"*/{own}")]
    limits = {
        path.read_text().strip()
        for group in groups
        for name in ("memory.limit_in_bytes", "memory.max")
        if (path := group / name).exists()
    }
    assert limits == {str(256 << 20)}
    quotas = {
        path.read_text().split()[0]
        for group in groups
        for name in ("cpu.cfs_quota_us", "cpu.max")
        if (path := group / name).exists()
    }
    assert quotas == {"150000"}


async def test_a_replica_that_takes_more_memory_than_its_limit_is_ended(shared):
    report = await shared.start(shared.spec(limits=Limits(memory_bytes=64 << 20)))
    exits = shared.node.exits()
    ending = asyncio.ensure_future(anext(exits))
    await asyncio.sleep(0)
    with pytest.raises(Exception):  # noqa: B017 - whatever a dying server does
        await shared.tell(report.replica, "hoard = b'x' * (256 << 20)")
    status = await asyncio.wait_for(ending, 10)
    await exits.aclose()
    assert (status.replica, status.exit_code) == (report.replica, -9)
    await shared.stop(report.replica)
