"""What shapes of model delegate: the floors that guard regressions. A file below one is slow and right."""

from __future__ import annotations

import re

import pytest

from exporter.bundle import read_bundle

# Of all operators, in prefill and in main, measured with XNNPACK in ExecuTorch 1.5.1 and rounded down.
SHARES = {
    "tiny_bundle": (0.73, 0.87),
    "slack_bundle": (0.73, 0.79),
    "llama_bundle": (0.76, 0.84),
    "int8_bundle": (0.71, 0.84),
    "int4_bundle": (0.73, 0.87),
    "mixed_bundle": (0.71, 0.84),
    "half_cache_bundle": (0.70, 0.76),
    "int8_cache_bundle": (0.66, 0.72),
    "int8_global_cache_bundle": (0.69, 0.74),
}


@pytest.mark.parametrize("name", SHARES)
def test_a_shape_delegates_what_it_did(request: pytest.FixtureRequest, name: str) -> None:
    found = {}
    for check in read_bundle(request.getfixturevalue(name)).manifest.graph_checks:
        if check.name == "delegated_share":
            inside, outside = (int(n) for n in re.findall(r"(\d+) (?:operators|kernels)", check.evidence))
            found[check.program] = inside / (inside + outside)
    for method, floor in zip(("prefill", "main"), SHARES[name], strict=True):
        assert floor <= found[method] < floor + 0.05, "less is a regression, more a better floor"
