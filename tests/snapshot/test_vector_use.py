"""Who has used AVX-512, as the kernel tells: with files as it writes them."""

import time
from pathlib import Path

import pytest

from nagara.snapshot import vector_use
from nagara.snapshot.vector_use import last_use_s, use_before_the_app, users_of_avx512

FIRST, OTHER = 101, 102


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that stands for /proc."""
    monkeypatch.setattr(
        vector_use, "Path", lambda path: tmp_path / str(path).removeprefix("/proc/")
    )
    return tmp_path


def put(proc: Path, pid: int, threads: dict[int, str], name: str = "python") -> None:
    for thread, text in threads.items():
        folder = proc / f"{pid}/task/{thread}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "arch_status").write_text(text)
    (proc / f"{pid}/comm").write_text(f"{name}\n")


def elapsed(milliseconds: int) -> str:
    return f"AVX512_elapsed_ms:\t{milliseconds}\n"


def test_a_thread_that_used_it_is_found_and_one_that_never_did_is_not(proc: Path) -> None:
    put(proc, FIRST, {FIRST: elapsed(-1), 201: elapsed(-1)})
    put(proc, OTHER, {OTHER: elapsed(-1), 202: elapsed(40)}, name="worker")
    assert users_of_avx512([FIRST, OTHER], FIRST, float("-inf")) == [f"worker ({OTHER})"]


def test_what_the_first_thread_used_before_it_was_the_apps_does_not_count(proc: Path) -> None:
    put(proc, FIRST, {FIRST: elapsed(5000)})
    before_s = use_before_the_app(FIRST)
    assert before_s == pytest.approx(time.monotonic() - 5, abs=1)
    assert users_of_avx512([FIRST], FIRST, before_s) == []
    put(proc, FIRST, {FIRST: elapsed(0)})
    assert users_of_avx512([FIRST], FIRST, before_s) == [f"python ({FIRST})"]
    put(proc, FIRST, {FIRST: elapsed(5000), 201: elapsed(5000)})  # but every other thread's does
    assert users_of_avx512([FIRST], FIRST, before_s) == [f"python ({FIRST})"]


@pytest.mark.parametrize("text", ["", "something else\n"])
def test_a_kernel_that_does_not_tell_accuses_nobody(proc: Path, text: str) -> None:
    put(proc, FIRST, {FIRST: text})
    assert last_use_s(FIRST, FIRST) == (float("-inf"), float("-inf"))
    assert users_of_avx512([FIRST, 999], FIRST, float("-inf")) == []
