"""The cache is sized by its setting, else by what can be used and what memory holds."""

from dataclasses import replace

import pytest

from nagara.engine import settings as module
from nagara.engine.errors import UnsupportedError
from nagara.engine.settings import EngineSettings, cache_blocks, free_memory_bytes
from nagara.engine.simulated import simulated_config

CONFIG = replace(simulated_config(), layers=10, kv_heads=2, head_dim=64)
BLOCK_BYTES = 10 * 2 * 2 * 64 * 2 * 16


def blocks(memory, monkeypatch, **settings):
    monkeypatch.setattr(module, "free_memory_bytes", lambda _: memory)
    return cache_blocks(EngineSettings(**settings), CONFIG, 1024, 2)


def test_the_setting_wins(monkeypatch):
    assert blocks(0, monkeypatch, cache_tokens=160) == 10
    with pytest.raises(UnsupportedError):
        blocks(0, monkeypatch, cache_tokens=15)


def test_no_more_than_all_places_can_use(monkeypatch):
    assert blocks(1 << 50, monkeypatch, max_concurrency=3) == 3 * 64


def test_a_share_of_the_free_memory_but_at_least_one_context(monkeypatch):
    assert blocks(int(100 * BLOCK_BYTES / module.CACHE_SHARE) + 1, monkeypatch) == 100
    assert blocks(0, monkeypatch) == 64


def test_free_memory_is_something_and_less_than_all():
    assert 0 < free_memory_bytes("cpu") < 1 << 50
