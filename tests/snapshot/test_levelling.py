"""What is told to libraries, and what a levelled snapshot needs."""

import dataclasses

import pytest

from nagara.snapshot.levelling import (
    LEVEL_FLAGS,
    can_level,
    levelled_environment,
    levelled_variant,
)
from nagara.snapshot.variant import HostFacts, Variant

RICH = HostFacts(
    LEVEL_FLAGS | {"aes", "avx512f", "sha_ni", "hypervisor", "amx_tile"}, 11952, 64, "6.18", ("t",)
)


def test_a_cpu_without_all_of_the_level_cannot_be_levelled() -> None:
    assert can_level(RICH)
    assert not can_level(dataclasses.replace(RICH, cpu_flags=RICH.cpu_flags - {"bmi2"}))


def test_a_levelled_variant_needs_the_level_and_what_no_variable_lowers() -> None:
    assert levelled_variant(RICH) == Variant(LEVEL_FLAGS | {"aes"}, 11952, 64, is_levelled=True)


@pytest.mark.parametrize(("frame_bytes", "fits"), [(1776, True), (11952, True), (20000, False)])
def test_a_levelled_variant_fits_hosts_whose_registers_take_less(
    frame_bytes: int, fits: bool
) -> None:
    host = dataclasses.replace(
        RICH, cpu_flags=LEVEL_FLAGS | {"aes"}, signal_frame_bytes=frame_bytes
    )
    assert (levelled_variant(RICH).misfit(host) is None) == fits
    exact = Variant(frozenset(), 11952, 64)
    assert (exact.misfit(host) is None) == (frame_bytes == 11952)


def test_what_the_app_sets_itself_stays() -> None:
    added = levelled_environment({"ATEN_CPU_CAPABILITY": "default", "OTHER": "1"})
    assert "ATEN_CPU_CAPABILITY" not in added
    assert "OTHER" not in added
    assert added["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_other_tunables_of_the_c_library_are_kept() -> None:
    own = "glibc.malloc.trim_threshold=1"
    both = levelled_environment({"GLIBC_TUNABLES": own})["GLIBC_TUNABLES"]
    assert both.startswith(f"{own}:glibc.cpu.hwcaps=-AVX512F")
    chosen = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"}
    assert "GLIBC_TUNABLES" not in levelled_environment(chosen)
