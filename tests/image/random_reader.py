"""Reads random places of two equal trees in several ways and compares them. One process of many."""

import mmap
import os
import random
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
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        return mapping[start : start + length]


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
