"""The measurement of HTTP's cost really asks over HTTP and compares with the same work alone."""

from nagara.engine.bench_http import KINDS, run_http
from nagara.engine.settings import EngineSettings


def test_each_kind_of_company_is_measured_with_the_same_number_of_tokens(tiny):
    settings = EngineSettings(dtype="float32", max_concurrency=32)
    said = []
    result = run_http(tiny, settings, 1, said.append)
    assert set(result["by_kind"]) == set(KINDS)
    assert all(phase["step_ms"] > 0 for phase in result["by_kind"].values())
    assert result["http_ratio"] > 0
    assert result["tokenize_ratio"] > 0
    assert len(said) == len(KINDS)
