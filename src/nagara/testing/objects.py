"""Content without a pattern, and putting it into the folder that an origin serves."""

import hashlib
from pathlib import Path

from nagara.store.names import CHUNK_BYTES, ChunkList, ObjectName, name_bytes


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes without a pattern, the same each time for a seed."""
    return hashlib.shake_128(seed.to_bytes(8, "big")).digest(size)


def chunk_list(content: bytes) -> ChunkList:
    """The chunk list that this content would have."""
    hashes = [
        hashlib.sha256(content[at : at + CHUNK_BYTES]).digest()
        for at in range(0, len(content), CHUNK_BYTES)
    ]
    return ChunkList(hashes, len(content))


def put_object(root: Path, content: bytes, tenant: str = "default") -> ObjectName:
    """Puts an object, and its chunk list if it has one, into an origin's folder."""
    name = name_bytes(content)
    entries = {name.key: content}
    if name.is_chunked:
        entries[name.list_key] = chunk_list(content).to_bytes()
    for key, data in entries.items():
        path = root / tenant / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return name
