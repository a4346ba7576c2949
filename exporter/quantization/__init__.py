"""Quantise a decoder in place, before it is traced, as a `QuantizationSpec` says."""

from __future__ import annotations

import torch

from exporter.machine import release_freed_memory
from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.quantization import calibration, smoothing
from exporter.quantization.linears import check_linears, grid_of, int4_rounding, linear_names, quantize_linears
from exporter.quantization.modules import QuantizedEmbedding, QuantizedLinear, SplitEmbedding, SplitLinear
from exporter.quantization.tables import check_tables, quantize_tables
from exporter.spec import QuantizationSpec

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "SplitEmbedding", "SplitLinear", "quantize"]


def quantize(
    decoder: Decoder, spec: QuantizationSpec, ids: torch.Tensor | None = None, read: ReadParameter = all_read
) -> None:
    """Replace the modules `spec` names by their quantised forms, and fold factors into the others, in place.

    What the factors and GPTQ's rounding follow is what goes through the float model over `ids`; equal weights, ids and
    numbers of threads give an equal result. Routers of experts and experts' stacked weights keep their float values.

    Args:
        decoder: the float32 model; of one that is unread, one layer and one table at a time are ever in float.
        spec: what to do.
        ids: int64 ``[1, T]`` of `calibration.calibration_ids`, where ``spec.is_calibrated``.
        read: gives the parameters of an unread decoder.

    Raises:
        ConfigError: `group_size` does not divide a quantised weight's input channels, or `keep_int8` names nothing.
    """
    check_linears(decoder, spec)
    check_tables(decoder, spec)
    if not spec.is_calibrated:
        int4 = int4_rounding(spec, None)
        for layer in (f"layers.{n}" for n in range(len(decoder.layers))):
            decoder.read_part(layer, read)
            quantize_linears(decoder, spec, linear_names(decoder, f"{layer}."), int4)
        decoder.read_part("norm", read)
        quantize_tables(decoder, spec, int4, read)
        return
    assert ids is not None, "smoothing and GPTQ follow the inputs of the model"
    for n, inputs in calibration.observe(decoder, ids, lambda name: _rounded_by_gptq(decoder, spec, name), read):
        if n is None:
            release_freed_memory()  # of the layers' floats
            head = inputs[calibration.HEAD]
            if spec.smooth and spec.head != "none":
                smoothing.fold_head(decoder, head)
            quantize_tables(decoder, spec, int4_rounding(spec, head.moments), read)
            continue
        users = calibration.sites(decoder.layers[n])
        if spec.smooth and spec.linear != "none":
            smoothing.fold_layer(decoder.layers[n], inputs)
        for site, names in users.items():
            full = [f"layers.{n}.{name}" for name in names]
            quantize_linears(decoder, spec, full, int4_rounding(spec, inputs[site].moments))


def _rounded_by_gptq(decoder: Decoder, spec: QuantizationSpec, site: str) -> bool:
    """Whether a linear at this input gets 4 bits by GPTQ."""
    if spec.rounding != "gptq":
        return False
    if site == calibration.HEAD:
        return spec.head == "int4"
    _, number, own = site.split(".", 2)
    names = calibration.sites(decoder.layers[int(number)])[own]
    return any(grid_of(f"layers.{number}.{name}", spec) == "int4" for name in names)
