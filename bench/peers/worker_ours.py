"""Our own bundle, measured by the code of ``runtime_ref bench``, with the protocol of the peers' workers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from protocol import divergence
from torch import Tensor

from exporter.bundle import read_bundle
from exporter.quiet import quieten_libraries
from runtime_ref.bench import bench
from runtime_ref.bench_report import versions
from runtime_ref.programs import choose


def main(directory: Path, request_file: Path) -> None:
    quieten_libraries()
    request = json.loads(request_file.read_text())
    bundle = choose(read_bundle(directory, verify_files=False), None)
    lengths = request["lengths"]
    divergences: list[float] = []
    expected = np.load(request["expected"], mmap_mode="r") if request["score"] else None

    def watch(logits: Tensor) -> None:
        assert expected is not None
        divergences.append(divergence(expected[len(divergences)], logits.numpy()))

    found = bench(
        bundle,
        request["ids"],
        threads=request["threads"],
        prefills=[length for length in lengths if length <= 2048],
        contexts=lengths,
        scoring=expected is not None,
        watch=watch,
    )
    result = {
        "load_seconds": found.load_seconds,
        "first_token_seconds": found.first_token_seconds,
        "prefill": {length.tokens: length.prefill for length in found.lengths},
        "decode": {length.tokens: length.decode for length in found.lengths},
        "limits": {length.tokens: length.limit for length in found.lengths},
        "live_bytes": {length.tokens: length.live_bytes for length in found.lengths},
        "peaks": {length.tokens: length.peak_bytes for length in found.lengths},
        "resident": {length.tokens: asdict(length.resident) for length in found.lengths},
        "peak_bytes": found.peak_bytes,
        "bare_bytes": found.bare_bytes,
        "bare": asdict(found.bare),
        "file_bytes": found.program_bytes,
        "bandwidth": found.bandwidth,
        "weights": found.weights,
        "nll": found.nll,
        "kl": sum(divergences) / len(divergences) if divergences else None,
        "versions": versions(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
