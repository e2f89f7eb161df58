"""`nagara bench weights`: streaming into memory against what `fio` reads with as many readers.

Both read the same files in turn, from the page cache and from the disk with the cache of these
files given up; whether a run came from where it should have is counted. The memory that weights
go to exists beforehand, as `fio`'s does. From the page cache `fio` reads into blocks of 64 MiB a
reader, which lie in memory as weights do; what it reads into blocks that stay in the processor's
cache is printed beside it (`reference_small_gb_s`): that costs the machine no writing to memory.
From the disk its blocks are as large as our own. `fio` takes no value hashes. Where there is no
`fio`, `dd` stands in.
"""

import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nagara.engine.errors import EngineError
from nagara.engine.modelfolder import TensorPlace, read_safetensors_header
from nagara.engine.weight_stream import SPAN_BYTES, HostTarget, Streamed, WeightStream

BLOCK_BYTES, SMALL_BLOCK_BYTES = 64 << 20, 256 << 10
RANDOM_BYTES = 2 * 10**9
_LAYERS = 32
_TRIES, _PURE_SHARE = 5, 0.99
# A short read is measured so much more often: a moment of others' work is all of it.
_LONG_BYTES, _MOST_REPEATED = 1_200_000_000, 4
_LOOPS = 2  # of fio over the files, so that making its buffers does not count for much
Note = Callable[[str], None]


def make_random_model(folder: Path, size_bytes: int = RANDOM_BYTES) -> Path:
    """A safetensors file of random tensors in as many layers as an 8B model has; its folder."""
    file = folder / "model.safetensors"
    columns = 4096
    rows = size_bytes // (_LAYERS * columns * 2)
    size = rows * columns * 2
    header = {
        f"model.layers.{layer}.mlp.up_proj.weight": {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [layer * size, (layer + 1) * size],
        }
        for layer in range(_LAYERS)
    }
    text = json.dumps(header).encode()
    draw = np.random.default_rng(0)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _ in range(_LAYERS):
            stream.write(draw.bytes(size))
        stream.flush()
        os.fsync(stream.fileno())
    return folder


def run(models: Sequence[tuple[str, Path]], readers: int, runs: int, note: Note) -> dict[str, Any]:
    """Measures folders of safetensors by name.

    Raises:
        EngineError: a folder has none, or the reference cannot be run.
    """
    cases = []
    for name, folder in models:
        files = sorted(folder.glob("*.safetensors"))
        places = [p for file in files for p in read_safetensors_header(file).values()]
        if not places:
            raise EngineError("holds no safetensors", where=str(folder))
        memory = _Memory(places)
        for source in ("page cache", "disk"):
            note(f"{name} from the {source}")
            cases.append(_case(name, source, files, memory, readers, runs))
        memory.close()
    worst = min(cases, key=lambda case: float(case["ratio"]))
    return {
        "readers": readers,
        "runs": runs,
        "reference": "fio" if shutil.which("fio") else "dd",
        **{key: worst[key] for key in ("gb_s", "reference_gb_s", "ratio")},
        "cases": cases,
    }


class _Memory:
    """Memory for all tensors, every page of it touched."""

    def __init__(self, places: Sequence[TensorPlace]) -> None:
        self._starts, size = [], 0
        for place in places:
            self._starts.append(size)
            size += -(-(place.end - place.start) // 64) * 64
        self._places = places
        self._pages = mmap.mmap(-1, size)
        self._pages.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self._pages, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
        self._base = ctypes.addressof(ctypes.c_uint8.from_buffer(self._pages))

    def stream(self, readers: int) -> Streamed:
        targets = [
            (place, HostTarget(self._base + start))
            for place, start in zip(self._places, self._starts, strict=True)
        ]
        stream = WeightStream(targets, readers=readers)
        stream.begin()
        return stream.finish()

    def close(self) -> None:
        del self._base  # the pages go with the last reference


@dataclass(frozen=True, slots=True)
class _Reference:
    """What reads the same files, with blocks of one size."""

    files: Sequence[Path]
    readers: int
    is_direct: bool

    def gb_s(self, block_bytes: int) -> float:
        sizes = [file.stat().st_size for file in self.files]
        block = max(4096, min(block_bytes, min(sizes) // self.readers // 4096 * 4096))
        seconds = sum(self._seconds(file, block) for file in self.files)
        return sum(sizes) / seconds / 1e9

    def _seconds(self, file: Path, block: int) -> float:
        size = file.stat().st_size // (self.readers * block) * (self.readers * block)
        share = size // self.readers
        if shutil.which("fio"):
            rate = self._fio(file, block, share)
        else:
            rate = self._dd(file, block, share)
        return file.stat().st_size / rate

    def _fio(self, file: Path, block: int, share: int) -> float:
        command = ["fio", "--name=reference", f"--filename={file}", "--readonly", "--rw=read"]
        command += [f"--bs={block}", f"--numjobs={self.readers}", f"--size={share}", "--thread"]
        command += [f"--offset_increment={share}", "--ioengine=psync", "--group_reporting"]
        command += [f"--direct={int(self.is_direct)}", "--invalidate=0", "--output-format=json"]
        command += [f"--loops={1 if self.is_direct else _LOOPS}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EngineError(f"fio: {done.stderr.strip()[-200:]}", where=str(file))
        return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])

    def _dd(self, file: Path, block: int, share: int) -> float:
        flags = ["iflag=direct"] if self.is_direct else []
        began_s = time.perf_counter()
        flags += ["of=/dev/null", f"bs={block}", f"count={share // block}", "status=none"]
        running = [
            subprocess.Popen(["dd", f"if={file}", f"skip={number * share // block}", *flags])
            for number in range(self.readers)
        ]
        if any(process.wait() for process in running):
            raise EngineError("dd could not read it", where=str(file))
        return share * self.readers / (time.perf_counter() - began_s)


def _case(
    name: str, source: str, files: Sequence[Path], memory: _Memory, readers: int, runs: int
) -> dict[str, Any]:
    is_disk = source == "disk"
    reference = _Reference(files, readers, is_direct=is_disk)
    ours, theirs, small = [], [], [0.0] if is_disk else []
    size = sum(file.stat().st_size for file in files)
    for turn in range(runs * max(1, min(_MOST_REPEATED, _LONG_BYTES // size))):
        if turn % 2:  # each is first in turn: what lies below this machine has caches too
            ours.append(_streamed(files, memory, readers, is_disk=is_disk))
        _prepare(files, is_disk=is_disk)
        theirs.append(reference.gb_s(SPAN_BYTES if is_disk else BLOCK_BYTES))
        if not turn % 2:
            ours.append(_streamed(files, memory, readers, is_disk=is_disk))
        if not is_disk:
            small.append(reference.gb_s(SMALL_BLOCK_BYTES))
    ratios = [mine.gb_s / other for mine, other in zip(ours, theirs, strict=True)]
    rates = [mine.gb_s for mine in ours]
    return {
        "model": name,
        "source": source,
        "size_bytes": ours[0].size_bytes,
        "cached_share": round(
            sum(m.cached_bytes for m in ours) / sum(m.size_bytes for m in ours), 4
        ),
        "gb_s": round(statistics.median(rates), 3),
        "gb_s_min": round(min(rates), 3),
        "gb_s_max": round(max(rates), 3),
        "reference_gb_s": round(statistics.median(theirs), 3),
        "reference_small_gb_s": round(statistics.median(small), 3) or None,  # None: not asked
        "ratio": round(statistics.median(ratios), 3),
    }


def _streamed(files: Sequence[Path], memory: _Memory, readers: int, *, is_disk: bool) -> Streamed:
    """One run, repeated if others on this machine have read the files, or driven them out.

    Raises:
        EngineError: they do so all the time.
    """
    for _ in range(_TRIES):
        _prepare(files, is_disk=is_disk)
        done = memory.stream(readers)
        share = done.cached_bytes / done.size_bytes
        if (share < 1 - _PURE_SHARE) if is_disk else (share > _PURE_SHARE):
            return done
    where = "disk" if is_disk else "page cache"
    raise EngineError(f"others keep it from being read from the {where}", where=str(files[0]))


def _prepare(files: Sequence[Path], *, is_disk: bool) -> None:
    """Puts the files into the page cache, or takes them out of it."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if is_disk:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                continue
            while stream.read(1 << 22):
                pass
