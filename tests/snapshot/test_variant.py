"""Which saved variant fits which host."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nagara.snapshot.variant import HostFacts, NoneFits, Variant, choose, snapshot_key

FLAGS = st.frozensets(st.sampled_from(["sse2", "avx", "avx2", "avx512f", "amx_tile"]))
HOSTS = st.builds(
    HostFacts,
    cpu_flags=FLAGS,
    signal_frame_bytes=st.sampled_from([1776, 3632, 11952]),
    cache_line_bytes=st.sampled_from([64, 128]),
    kernel_class=st.sampled_from(["6.1", "6.18"]),
    tools=st.just(("runc 1.1.5", "criu 4.2.1")),
)
VARIANTS = st.builds(
    Variant,
    cpu_flags=FLAGS,
    signal_frame_bytes=st.sampled_from([1776, 3632, 11952]),
    cache_line_bytes=st.sampled_from([64, 128]),
)
HOST = HostFacts(frozenset({"sse2", "avx2"}), 3632, 64, "6.18", ("runc 1.1.5", "criu 4.2.1"))


@given(HOSTS)
def test_a_host_fits_what_was_made_on_it(host):
    assert choose({"own": Variant.of_host(host)}, host) == "own"


@given(st.dictionaries(st.text(max_size=3), VARIANTS, max_size=6), HOSTS)
def test_the_choice_is_the_richest_of_those_whose_needs_are_met(variants, host):
    chosen = choose(variants, host)
    fitting = {
        name: variant
        for name, variant in variants.items()
        if variant.cpu_flags <= host.cpu_flags
        and variant.signal_frame_bytes == host.signal_frame_bytes
        and variant.cache_line_bytes == host.cache_line_bytes
    }
    if not fitting:
        assert isinstance(chosen, NoneFits)
        assert len(chosen.reasons) <= len(variants)
        assert bool(chosen.reasons) == bool(variants)
    else:
        richest = max(len(variant.cpu_flags) for variant in fitting.values())
        assert chosen in fitting
        assert len(fitting[chosen].cpu_flags) == richest


@given(st.dictionaries(st.text(max_size=3), VARIANTS, max_size=6), HOSTS, FLAGS)
def test_a_host_with_more_flags_loses_no_choice(variants, host, more):
    if not isinstance(choose(variants, host), NoneFits):
        richer = replace(host, cpu_flags=host.cpu_flags | more)
        assert not isinstance(choose(variants, richer), NoneFits)


def test_the_reason_names_what_the_cpu_lacks():
    variant = Variant(frozenset({"sse2", "avx512f", "amx_tile"}), 3632, 64)
    assert choose({"v": variant}, HOST) == NoneFits(("this CPU lacks amx_tile, avx512f",))


def test_another_register_area_or_cache_line_does_not_fit():
    for variant, word in (
        (Variant(HOST.cpu_flags, 11952, 64), "registers"),
        (Variant(HOST.cpu_flags, 3632, 128), "cache lines"),
    ):
        chosen = choose({"v": variant}, HOST)
        assert isinstance(chosen, NoneFits)
        assert word in chosen.reasons[0]


def test_the_key_changes_with_the_driver_and_the_kind_of_device() -> None:
    hosts = [
        replace(HOST, devices=devices)
        for devices in ((), ("cuda driver 570.1", "H200"), ("cuda driver 580.2", "H200"))
    ]
    assert len({snapshot_key({}, host, ()) for host in hosts}) == 3


def test_the_key_changes_with_each_part_and_with_nothing_else():
    app = {"tenant": "t", "app": "a", "definition": "d", "models": [("m", "1")]}
    code = ("nagara 0.1",)
    keys = {
        snapshot_key(app, HOST, code),
        *(snapshot_key({**app, name: "other"}, HOST, code) for name in app),
        snapshot_key({**app, "more": None}, HOST, code),
        snapshot_key(app, replace(HOST, kernel_class="6.19"), code),
        snapshot_key(app, replace(HOST, tools=("runc 1.1.5", "criu 4.3")), code),
        snapshot_key(app, HOST, ("nagara 0.2",)),
    }
    assert len(keys) == 1 + len(app) + 4
    reordered = dict(reversed(app.items()))
    other_cpu = replace(HOST, cpu_flags=frozenset(), signal_frame_bytes=1, cache_line_bytes=1)
    assert snapshot_key(reordered, other_cpu, code) == snapshot_key(app, HOST, code)
