"""A good folder is described; every broken one is refused with the file named."""

import json
import struct
from pathlib import Path

import pytest

from nagara.engine.errors import ModelFolderError
from nagara.engine.modelfolder import check_model_folder


def write_safetensors(file: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", {"a": (2, 3), "b": (4,)})
    return tmp_path


def shard_it(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "one.safetensors", {"a": (2, 3)})
    write_safetensors(folder / "two.safetensors", {"b": (4,)})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_good_folder_is_described(folder: Path) -> None:
    found = check_model_folder(folder)
    assert found.config == {"model_type": "llama"}
    assert found.tensors["a"].shape == (2, 3)
    assert found.weight_bytes == 40


def test_shards_are_followed_through_the_index(folder: Path) -> None:
    shard_it(folder)
    found = check_model_folder(folder)
    assert {place.file.name for place in found.tensors.values()} == {
        "one.safetensors",
        "two.safetensors",
    }


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFolderError, match=name):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFolderError, match=name):
        check_model_folder(folder)


@pytest.mark.parametrize("cut", [1, 39, 45, 100])
def test_a_truncated_weights_file_is_refused_before_it_is_mapped(folder: Path, cut: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        check_model_folder(folder)


@pytest.mark.parametrize("head", [b"", b"1234567", struct.pack("<Q", 1 << 60), b"\0" * 16])
def test_a_file_of_another_format_is_refused(folder: Path, head: bytes) -> None:
    (folder / "model.safetensors").write_bytes(head)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        check_model_folder(folder)


def test_a_weights_file_longer_than_its_header_says_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ModelFolderError, match="needs"):
        check_model_folder(folder)


def test_a_shape_that_does_not_match_its_bytes_is_refused(folder: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(ModelFolderError, match="'a'"):
        check_model_folder(folder)


def _entry(start: object, end: object, shape: object = (4,), dtype: object = "F32") -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": _entry(-16, 0), "b": _entry(0, 16)}, 16),
        ({"a": _entry(0, 16), "b": _entry(0, 16)}, 16),
        ({"a": _entry(0, 16), "b": _entry(8, 24)}, 24),
        ({"a": _entry(0, 16), "b": _entry(20, 36)}, 36),
        ({"a": _entry(16, 32)}, 32),
        ({"a": _entry(0.0, 16.0)}, 16),
        ({"a": _entry(False, 16)}, 16),
        ({"a": _entry(0, 16, ["4"])}, 16),
        ({"a": _entry(0, 16, [4.0])}, 16),
        ({"a": _entry(0, 16, [-2, -2])}, 16),
        ({"a": _entry(0, 16, 4)}, 16),
        ({"a": {**_entry(0, 16), "data_offsets": [0]}}, 16),  # type: ignore[dict-item]
        ([], 0),
    ],
)
def test_a_crafted_header_is_refused(folder: Path, header: object, size: int) -> None:
    raw = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    with pytest.raises(ModelFolderError) as refused:
        check_model_folder(folder)
    assert refused.value.where == str(file)


def test_a_header_that_ends_the_parsers_stack_is_refused(folder: Path) -> None:
    raw = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(ModelFolderError, match="cannot be read"):
        check_model_folder(folder)
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        check_model_folder(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard_it(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"two\.safetensors"):
        check_model_folder(folder)


def test_a_shard_without_the_tensor_the_index_names_is_refused(folder: Path) -> None:
    shard_it(folder)
    write_safetensors(folder / "two.safetensors", {"c": (4,)})
    with pytest.raises(ModelFolderError, match="'b'"):
        check_model_folder(folder)


def test_an_index_that_leaves_the_folder_is_refused(folder: Path) -> None:
    shard_it(folder)
    index = {"weight_map": {"a": "../one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match="not a file name"):
        check_model_folder(folder)


def test_other_weights_formats_are_refused_with_a_hint(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match="convert"):
        check_model_folder(folder)


def test_something_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="not a folder"):
        check_model_folder(tmp_path / "nothing")
