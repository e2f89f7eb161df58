"""Reads random places of two equal trees in several ways and compares them. One process of many."""

import errno
import mmap
import os
import random
import signal
import sys
from pathlib import Path

SOURCE, TARGET = Path(sys.argv[1]), Path(sys.argv[2])
RNG = random.Random(int(sys.argv[3]))


def by_pread(path: Path, start: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while len(data) < length and (
            piece := os.pread(descriptor, length - len(data), start + len(data))
        ):
            data += piece
        return data
    finally:
        os.close(descriptor)


def by_mapping(path: Path, start: int, length: int) -> bytes:
    """In a process of its own: there an error is a signal that ends it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        ended = 255
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as all_of,
            ):
                touched = all_of[start : start + length]
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(touched)
            ended = 0
        except OSError as error:
            ended = error.errno or errno.EIO
        finally:
            os._exit(ended)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == -signal.SIGBUS:
        raise OSError(errno.EIO, "a page could not be had", str(path))
    if 0 < ended < 255:
        raise OSError(ended, os.strerror(ended), str(path))
    if ended:
        raise RuntimeError(f"a mapping of {path} ended with {ended}")
    return found


def by_sendfile(path: Path, start: int, length: int) -> bytes:
    reading, writing = os.pipe()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sent = os.sendfile(writing, descriptor, start, min(length, 4096))
        return os.read(reading, sent) if sent else b""
    finally:
        for each in (reading, writing, descriptor):
            os.close(each)


FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file())
for _ in range(40):
    file = RNG.choice(FILES)
    size = (SOURCE / file).stat().st_size
    start = RNG.randrange(size + 1)
    length = RNG.choice([1, 100, 4096, 65536, 1 << 20])
    way = RNG.choice([by_pread, by_mapping, by_sendfile] if size else [by_pread])
    for attempt in range(20):
        try:
            found = way(TARGET / file, start, length)
            break
        except OSError:  # an error is allowed, wrong bytes are not
            if attempt == 19:
                raise
    expected = way(SOURCE / file, start, length)
    assert found == expected, (file, start, length, way.__name__, len(found), len(expected))
