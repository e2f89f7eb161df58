"""`nagara bench files`: what images and mounts cost, beside the same things done natively.

Times are medians of `--runs`; ratios are formed within one run of the command. Progress goes to
standard error, one JSON object (with `--json`) or a table to standard output.
"""

import hashlib
import importlib.util
import json
import logging
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nagara import __version__
from nagara.base.errors import UsageError
from nagara.cli.files_cache_bench import measure_cache
from nagara.cli.files_lab import (
    Lab,
    LabMachine,
    Origin,
    forget_pages,
    needed_packages,
    opened_lab,
    running_origin,
    timed_import,
)
from nagara.image.index import build_index
from nagara.image.lazy_layer import set_read_ahead
from nagara.image.mount_api import mount_overlay_on
from nagara.image.mounting import mount_index
from nagara.image.mounts import unmount_if_mounted
from nagara.image.tree import Node, new_folder
from nagara.store.local import DEFAULT_TENANT
from nagara.store.names import ObjectName

_log = logging.getLogger(__name__)
_LATENCIES_MS = (0, 1, 5, 20)
_FAR_MS = (100, 200)
_LINK_BYTES_S = 250e6  # of a machine to its bucket
_READ_AHEAD_KIB = (128, 1024, 32768, 262144)
_MODULES = ("pandas", "torch", "aiohttp")
_PIECE_BYTES = 1 << 20
_CACHED_READS = 5


@click.command()
@click.option("--module", help="What to import  [default: pandas, else torch, else aiohttp].")
@click.option(
    "--packages",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder it is imported from  [default: the packages it needs, of this interpreter].",
)
@click.option("--runs", default=3, show_default=True, help="Of each case.")
@click.option("--files", "count", default=50_000, show_default=True, help="Files of the index.")
@click.option("--large", default=1024, show_default=True, help="MiB read in sequence.")
@click.option("--quick", is_flag=True, help="One run, two latencies, a smaller sequence.")
@click.option("--many", default=0, help="Also import and mount a tree of so many files.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to work; on the disk that matters  [default: a temporary folder].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def files(
    module: str | None,
    packages: Path | None,
    runs: int,
    count: int,
    large: int,
    quick: bool,
    many: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Index, mounts, cold and warm imports, sequential reads, read-ahead, sharing."""
    if os.geteuid() != 0:
        raise UsageError("mounting needs root")
    chosen = module or next(name for name in _MODULES if importlib.util.find_spec(name))
    if quick:
        runs, large = 1, min(large, 256)
    work = Path(tempfile.mkdtemp(prefix="nagara-bench-", dir=folder))
    try:
        with opened_lab(work / "lab") as lab:
            result = {
                "nagara": __version__,
                "machine": _machine(),
                "command": " ".join(["nagara", *sys.argv[1:]]),
                "load": os.getloadavg()[0],  # others' work at the start: figures suffer from it
                "index": _index(work, count, runs),
                **_imports(lab, work, packages, chosen, runs, quick=quick),
                "sequential": _sequential(lab, work, large, runs),
                "readahead": _read_ahead(lab, work, large // 4),
                "cache": measure_cache(work / "zone"),
                **({"many": _many(work / "many", many)} if many else {}),
            }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    click.echo(json.dumps(result, indent=2) if as_json else _table(result))


def _machine() -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release()}


def _median(measure: Callable[[], float], runs: int) -> dict[str, float]:
    found = [measure() for _ in range(runs)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _index(work: Path, count: int, runs: int) -> dict[str, Any]:
    _log.info("index of %d files", count)
    root = new_folder()
    for at in range(0, count, 100):
        folder = new_folder()
        assert root.kids is not None
        assert folder.kids is not None
        root.kids[b"d%06d" % at] = folder
        for number in range(at, min(at + 100, count)):
            name = ObjectName(hashlib.sha256(b"%d" % number).digest(), 4096 + number % 77777)
            folder.kids[b"file_%07d_module.py" % number] = Node(
                0o100644, size=name.size, mtime_ns=1_700_000_000_123_456_789, content=name
            )
    path = work / "index"

    def build() -> float:
        begun_s = time.perf_counter()
        with path.open("wb") as file:
            for piece in build_index(root):
                file.write(piece)
        return time.perf_counter() - begun_s

    def mount() -> float:
        lower, data, target = (work / name for name in ("e", "d", "m"))
        for folder in (lower, data, target):
            folder.mkdir(exist_ok=True)
        begun_s = time.perf_counter()
        mount_index(path, lower)
        mount_overlay_on([lower], target, data=[data])
        took_s = time.perf_counter() - begun_s
        unmount_if_mounted(target)
        unmount_if_mounted(lower)
        return took_s * 1000

    built, mounted = _median(build, runs), _median(mount, max(runs, 5))
    return {
        "files": count, "build_s": built["median"], "bytes": path.stat().st_size,
        "mount_ms": mounted["median"], "build_min_s": built["min"], "mount_max_ms": mounted["max"],
    }  # fmt: skip


def _imports(
    lab: Lab, work: Path, packages: Path | None, module: str, runs: int, *, quick: bool
) -> dict[str, Any]:
    tree = work / "tree"
    _copy_packages(packages, module, tree)
    native = [_native_cold(tree, module) for _ in range(max(runs, 3))]
    result: dict[str, Any] = {
        "module": module,
        "native_cold_s": statistics.median(cold for cold, _ in native),
        "native_cold_read_bytes": statistics.median(read for _, read in native),
        "imports": [],
    }
    with running_origin(work / "far") as origin, lab.machine() as maker:
        maker.add(tree, "image")
        maker.publish(origin, "image")
        for trace in (False, True):
            if trace:
                _record(maker, module)
                maker.publish(origin, "image")
            latencies = _LATENCIES_MS[::3] if quick else _LATENCIES_MS
            for latency in (*latencies, *(_FAR_MS if trace and not quick else ())):
                measured = _import_from(lab, origin, tree, module, latency, runs)
                result["imports"].append({"latency_ms": latency, "trace": trace, **measured})
                _log.info("%s", result["imports"][-1])
        result |= _warm(lab, origin, tree, module, runs)
        result["shared90_fetched_share"] = _shared(lab, origin, maker, tree)
    return result


def _import_from(
    lab: Lab, origin: Origin, tree: Path, module: str, latency_ms: float, runs: int
) -> dict[str, Any]:
    """Cold imports, each beside a native cold one: others' load then falls on both."""
    link = _LINK_BYTES_S if latency_ms in _FAR_MS else None
    pairs = [
        (_native_cold(tree, module)[0], _cold(lab, origin, module, latency_ms, link))
        for _ in range(runs)
    ]
    counted = pairs[-1][1][1]
    found = {
        "cold_s": statistics.median(cold for _, (cold, _) in pairs),
        "native_cold_s": statistics.median(native for native, _ in pairs),
        "ratio": statistics.median(cold / native for native, (cold, _) in pairs),
        "requests": counted["requests"],
        "bytes": counted["bytes"],
    }
    if link is not None:  # what a start from a bucket may take
        found["bound_s"] = found["native_cold_s"] + 3 * latency_ms / 1000 + counted["bytes"] / link
    return found


def _warm(lab: Lab, origin: Origin, tree: Path, module: str, runs: int) -> dict[str, float]:
    """Warm imports from the mount and from the folder, in turns."""
    with lab.machine(origin) as machine:
        machine.show("image")
        folders = (tree, machine.target)
        for folder in folders:
            timed_import(folder, module)
        pairs = [
            [timed_import(folder, module)[0] for folder in folders] for _ in range(max(2 * runs, 5))
        ]
    return {
        "native_warm_s": statistics.median(native for native, _ in pairs),
        "warm_s": statistics.median(mounted for _, mounted in pairs),
        "warm_ratio": statistics.median(mounted / native for native, mounted in pairs),
    }


def _copy_packages(packages: Path | None, module: str, tree: Path) -> None:
    """Into a folder of their own: it is changed later."""
    if packages is not None:
        _log.info("copying %s", packages)
        shutil.copytree(packages, tree, symlinks=True)
        return
    tree.mkdir()
    for path in needed_packages(module):
        _log.info("copying %s", path)
        if path.is_dir():
            shutil.copytree(path, tree / path.name, symlinks=True)
        else:
            shutil.copy(path, tree / path.name)


def _native_cold(tree: Path, module: str) -> tuple[float, int]:
    forget_pages(tree)
    return timed_import(tree, module)


def _cold(
    lab: Lab, origin: Origin, module: str, latency_ms: float, link_bytes_s: float | None
) -> tuple[float, dict[str, Any]]:
    """From nothing on the machine, the daemon running, to the end of the import."""
    origin.behave()
    with lab.machine(origin) as machine:
        machine.mounts.lazy_layer(DEFAULT_TENANT).ensure()
        origin.counters()
        origin.behave(latency_ms=latency_ms, link_bytes_s=link_bytes_s)
        begun_s = time.perf_counter()
        machine.show("image")
        timed_import(machine.target, module)
        took_s = time.perf_counter() - begun_s
        counted = origin.counters()
        origin.behave()
    return took_s, {"requests": sum(counted["requests"].values()), "bytes": counted["bytes"]}


def _record(maker: LabMachine, module: str) -> None:
    mounted = maker.show("image")
    timed_import(maker.target, module)
    maker.mounts.finish_recording(mounted)
    maker.hide()


def _shared(lab: Lab, origin: Origin, maker: LabMachine, tree: Path) -> float:
    """Share of bytes that a second image cost of which 90 % were known."""
    changed = 0
    sizes = [(path, path.stat().st_size) for path in tree.rglob("*") if path.is_file()]
    total = sum(size for _, size in sizes)
    for path, size in sorted(sizes):
        if changed >= total / 10:
            break
        if size > 4096 and not path.name.endswith(".so"):
            with path.open("ab") as file:
                file.write(b"\n")
            changed += size
    maker.add(tree, "second")
    maker.publish(origin, "second")
    with lab.machine(origin) as machine:
        for name in ("image", "second"):
            machine.hide()
            origin.counters()
            mounted = machine.show(name)
            machine.mounts.fill(mounted)
            _wait_filled(machine, mounted)
        fetched: int = origin.counters()["bytes"]
    return fetched / total


def _wait_filled(machine: LabMachine, mounted: Any) -> None:
    deadline_s = time.monotonic() + 600
    while (progress := machine.mounts.progress(mounted)).is_running:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"an image was not brought here in time: {progress}")
        time.sleep(0.02)


def _sequential(lab: Lab, work: Path, mib: int, runs: int) -> dict[str, Any]:
    """One reader of a large object that is on this machine.

    Of one that was proven before through the mount and, while its starts are recorded, through the
    daemon; of one that has to be checked. The page cache is read after as many reads of each, in
    turns with the file itself: a FUSE file system caches in small pages, a disk's in large ones.
    """
    _log.info("sequential reads of %d MiB", mib)
    source = work / "large"
    source.mkdir(exist_ok=True)
    path = source / "file"
    with path.open("wb") as file:
        for number in range(mib):
            file.write(hashlib.shake_128(b"%d" % number).digest(_PIECE_BYTES))
    with lab.machine() as machine:
        machine.add(source, "large")
        daemon = [_first_touch(machine) for _ in range(runs)]
        # Nothing is proven: everything is hashed before it is given out.
        checked = [_first_touch(machine, is_proven=False) for _ in range(runs)]
        machine.show("large")
        served = _page_cache(machine, path)
        machine.hide()
        machine.end_recording("large")
        machine.prove()
        proven = [_first_touch(machine) for _ in range(runs)]
        mounted = machine.show("large")
        cached = _page_cache(machine, path)
        machine.mounts.fill(mounted)
        _wait_filled(machine, mounted)
        machine.hide()
        is_lazy = machine.show("large", prefer_lazy=False).is_lazy
        local = _page_cache(machine, path)
        machine.hide()
    return {
        "bytes": mib << 20,
        "first_touch_gb_s": statistics.median(proven),
        "first_touch_max_gb_s": max(proven),
        "first_touch_daemon_gb_s": statistics.median(daemon),
        "first_touch_daemon_max_gb_s": max(daemon),
        "first_touch_verified_gb_s": statistics.median(checked),
        "first_touch_verified_max_gb_s": max(checked),
        "page_cache_gb_s": cached["gb_s"],
        "native_page_cache_gb_s": cached["native_gb_s"],
        "page_cache_ratio": cached["ratio"],
        "daemon_page_cache_ratio": served["ratio"],
        "local_layer_page_cache_ratio": None if is_lazy else local["ratio"],
    }


def _page_cache(machine: LabMachine, native: Path) -> dict[str, float]:
    """Reads of what is cached, in turns with the file itself, which came from the disk as well."""
    forget_pages(native.parent)
    for path in (native, machine.target / "file"):
        _rate(path)
    pairs = [(_rate(native), _rate(machine.target / "file")) for _ in range(_CACHED_READS)]
    return {
        "native_gb_s": statistics.median(pair[0] for pair in pairs),
        "gb_s": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(shown / own for own, shown in pairs),
    }


def _first_touch(machine: LabMachine, *, is_proven: bool = True) -> float:
    """GB/s of a new daemon and a new mount over an object whose file is in the page cache."""
    machine.objects.syncer.flush()
    lazy = machine.mounts.lazy_layer(DEFAULT_TENANT)
    lazy.unmount()
    objects = machine.objects.tenant(DEFAULT_TENANT).objects
    for path in objects.iterdir():
        _rate(path)
        if not is_proven:  # another change time
            path.chmod(0o400 if path.stat().st_mode & 0o40 else 0o440)
    machine.show("large")
    rate = _rate(machine.target / "file")
    machine.hide()
    return rate


def _rate(path: Path) -> float:
    """GB/s of one reader."""
    buffer = mmap.mmap(-1, _PIECE_BYTES)  # on whole pages, like other programs' buffers
    size = 0
    begun_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            size += got
    return size / (time.perf_counter() - begun_s) / 1e9


def _read_ahead(lab: Lab, work: Path, mib: int) -> list[dict[str, Any]]:
    found = []
    source = work / "large"
    with (source / "file").open("r+b") as file:
        file.truncate(max(mib, 80) << 20)
    with running_origin(work / "far2") as origin:
        with lab.machine() as maker:
            maker.add(source, "image")
            maker.publish(origin, "image")
        for latency in (1, 20):
            for kib in _READ_AHEAD_KIB:
                origin.behave()
                with lab.machine(origin) as machine:
                    machine.show("image")
                    set_read_ahead(machine.mounts.lazy_layer(DEFAULT_TENANT).path, kib)
                    origin.behave(latency_ms=latency)
                    rate = _rate(machine.target / "file")
                found.append({"kib": kib, "latency_ms": latency, "gb_s": rate})
                _log.info("%s", found[-1])
    return found


def _many(folder: Path, count: int) -> dict[str, Any]:
    _log.info("a tree of %d files", count)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "nagara.cli.files_many", str(folder), str(count)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _table(result: dict[str, Any]) -> str:
    index, sequential = result["index"], result["sequential"]
    lines = [
        f"index of {index['files']} files: {index['build_s']:.2f} s, "
        f"{index['bytes'] / 1e6:.1f} MB, mounted in {index['mount_ms']:.2f} ms",
        f"import {result['module']}: native cold {result['native_cold_s']:.2f} s, "
        f"warm {result['native_warm_s']:.2f} s; mounted warm x{result['warm_ratio']:.2f}",
    ]
    lines += [
        f"  {entry['latency_ms']:>4} ms {'with' if entry['trace'] else 'without'} trace: "
        f"{entry['cold_s']:.2f} s, x{entry['ratio']:.2f}, {entry['requests']} requests"
        + (f", bound {entry['bound_s']:.2f} s" if "bound_s" in entry else "")
        for entry in result["imports"]
    ]
    cache = result["cache"]
    lines.append(
        f"zone cache: {cache['gb_s']:.2f} GB/s to {cache['readers']} readers, 64 KiB objects "
        f"p50 {cache['small_p50_ms']:.2f} ms, p99 {cache['small_p99_ms']:.2f} ms"
    )
    lines.append(
        f"sequential: first touch {sequential['first_touch_gb_s']:.2f} GB/s, by the daemon "
        f"{sequential['first_touch_daemon_gb_s']:.2f}, with verification "
        f"{sequential['first_touch_verified_gb_s']:.2f}; page cache x"
        f"{sequential['page_cache_ratio']:.2f} of native, the daemon's x"
        f"{sequential['daemon_page_cache_ratio']:.2f}, local layer x"
        f"{sequential['local_layer_page_cache_ratio'] or 0.0:.2f}"
    )
    lines += [
        f"  read-ahead {entry['kib']:>6} KiB at {entry['latency_ms']:>2} ms: "
        f"{entry['gb_s']:.3f} GB/s"
        for entry in result["readahead"]
    ]
    if many := result.get("many"):
        lines.append(
            f"{many['files']} files: imported in {many['import_s']:.0f} s with "
            f"{many['rss_bytes'] / 1e6:.0f} MB, mounted in {many['mount_ms']:.2f} ms"
        )
    lines.append(f"a second image, 90 % shared, fetched {result['shared90_fetched_share']:.1%}")
    return "\n".join(lines)
