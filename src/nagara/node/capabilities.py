"""What a machine may have, what nagara uses it for, and what it does without. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing a machine has or lacks.

    Args:
        needs: names of those without which this one cannot be tried.
    """

    name: str
    purpose: str
    without: str
    get: str
    needs: tuple[str, ...] = ()


CONTAINERS = ("root", "runc", "overlay", "network_namespaces", "cgroups", "seccomp")
SNAPSHOTS = ("criu", "mkfs_erofs", "erofs_files", "checkpoint")

_KERNEL = "a kernel built with it"
_PLAIN_PROCESSES = "replicas run as plain processes: no isolation, no snapshots"
_PLAIN_STARTS = "no snapshots: every start begins from nothing"

CAPABILITIES = (
    Capability(
        "root",
        "containers, mounts and snapshots",
        _PLAIN_PROCESSES,
        "sudo nagara up; in a container: one with all rights (--privileged)",
    ),
    Capability("runc", "replicas as containers", _PLAIN_PROCESSES, "nagara setup runc"),
    Capability(
        "overlay",
        "a writable root of its own for each replica",
        _PLAIN_PROCESSES,
        "CONFIG_OVERLAY_FS, and a state folder on ext4, xfs or btrfs",
        needs=("root",),
    ),
    Capability(
        "network_namespaces",
        "equal ports for all replicas of an app",
        _PLAIN_PROCESSES,
        f"CONFIG_NET_NS: {_KERNEL}",
        needs=("root",),
    ),
    Capability(
        "cgroups",
        "limits, and ending all processes of a replica",
        _PLAIN_PROCESSES,
        "mount them: mount -t cgroup2 none /sys/fs/cgroup",
        needs=("root",),
    ),
    Capability(
        "seccomp",
        "refusing io_uring, which cannot be saved",
        _PLAIN_PROCESSES,
        f"CONFIG_SECCOMP_FILTER: {_KERNEL}",
    ),
    Capability(
        "egress",
        'apps that call out (network = "egress")',
        "their starts fail with the reason; apps that do not call out need nothing",
        "nft (package nftables), CONFIG_VETH, sysctl -w net.ipv4.ip_forward=1",
        needs=("root", "network_namespaces"),
    ),
    Capability("criu", "saving and restoring processes", _PLAIN_STARTS, "nagara setup criu"),
    Capability(
        "mkfs_erofs",
        "freezing what a replica wrote before it was saved",
        _PLAIN_STARTS,
        "nagara setup erofs",
    ),
    Capability(
        "erofs_files",
        "mounting what was frozen, straight from its file",
        _PLAIN_STARTS,
        "Linux 6.12 or newer with CONFIG_EROFS_FS_BACKED_BY_FILE",
        needs=("root", "mkfs_erofs"),
    ),
    Capability(
        "checkpoint",
        "a small server was saved, put back, and answers",
        _PLAIN_STARTS,
        "CONFIG_CHECKPOINT_RESTORE; nagara setup criu",
        needs=("root", "runc", "overlay", "network_namespaces", "cgroups", "seccomp", "criu"),
    ),
    Capability(
        "other_users",
        "saving servers whose processes run as another user than root",
        "such servers get no snapshots (nginx as www-data, PostgreSQL)",
        "in a container: --cap-add SYS_RESOURCE",
        needs=("root",),
    ),
    Capability(
        "run_in_memory",
        "CRIU keeps what it found out about the kernel in /run",
        "it finds it out again at each save and restore",
        "mount -t tmpfs none /run, at boot",
    ),
    Capability(
        "data_layers",
        "trees made of an index and shared files (not for `host` images)",
        "such trees are written out before a start",
        "Linux 6.5 or newer",
        needs=("root", "overlay"),
    ),
    Capability(
        "fuse",
        "files fetched when they are first read (not for `host` images)",
        "such files are fetched before a start",
        "modprobe fuse; in a container: --device /dev/fuse",
        needs=("root",),
    ),
    Capability(
        "image_mounts",
        "how replicas are shown images (not `host`)",
        "images are copied out before a first start",
        "what data_layers and fuse need",
        needs=("root",),
    ),
    Capability(
        "fuse_passthrough",
        "reading fetched files at the disk's own speed",
        "their content passes through a process",
        "Linux 6.9 or newer with CONFIG_FUSE_PASSTHROUGH",
        needs=("root", "fuse"),
    ),
    Capability(
        "c_library",
        "its choice of code for this CPU is in saved memory",
        "nobody has tried snapshots with another C library",
        "a system built on glibc",
    ),
    Capability(
        "huge_pages",
        "speed of servers with much memory; a restore begins with small pages",
        "nothing changes for snapshots",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    Capability(
        "page_cache",
        "measuring starts from a cold disk",
        "nagara bench coldstart refuses",
        "root, outside a container",
        needs=("root",),
    ),
    Capability(
        "cuda",
        "servers on an NVIDIA GPU",
        "servers use the CPU",
        "NVIDIA's driver, 570 or newer",
    ),
    Capability(
        "device_memory",
        "saving what replicas have on a GPU",
        "replicas on a GPU get no snapshots",
        "driver 570 or newer; pip install 'nagara[nvidia]', or the command cuda-checkpoint",
        needs=("cuda",),
    ),
    Capability(
        "cdi",
        "devices such as GPUs inside replicas' containers",
        "apps cannot ask for devices",
        "nvidia-ctk cdi generate --format=json --output=/etc/cdi/nvidia.json",
    ),
    Capability("nvml", "what a GPU holds and how it is", "it is not reported", "NVIDIA's driver"),
)
