"""`nagara bench weights` prints what it promises; how fast this machine is, it does not judge."""

import json

from click.testing import CliRunner

from nagara.cli.main import main


def test_a_random_folder_is_measured_from_both_places(tmp_path):
    from nagara.engine.bench_weights import make_random_model

    folder = make_random_model(tmp_path, 32 * 4096 * 2 * 64)
    command = ["--state", str(tmp_path), "bench", "weights", "--model", str(folder), "--json"]
    done = CliRunner().invoke(main, [*command, "--runs", "1", "--readers", "2"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {"gb_s", "reference_gb_s", "ratio", "nagara", "machine", "command"} <= result.keys()
    cache, disk = result["cases"]
    assert (cache["source"], disk["source"]) == ("page cache", "disk")
    assert cache["cached_share"] > 0.99 > disk["cached_share"]
    for case in (cache, disk):
        assert case["size_bytes"] == 32 * 4096 * 2 * 64
        assert case["ratio"] > 0


def test_a_folder_without_weights_is_refused(tmp_path):
    done = CliRunner().invoke(
        main, ["--state", str(tmp_path), "bench", "weights", "--model", str(tmp_path)]
    )
    assert done.exit_code == 1
    assert "holds no safetensors" in done.output
