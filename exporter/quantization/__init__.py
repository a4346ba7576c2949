"""Quantise a decoder in place, before it is traced, as a `QuantizationSpec` says."""

from __future__ import annotations

import torch

from exporter.machine import release_freed_memory
from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.quantization import calibration, smoothing
from exporter.quantization.gptq import Gptq, stretches
from exporter.quantization.linears import Nearest, Rounding, check_linears, linear_names, quantize_linears
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
        CheckpointError: what goes through the float model is not finite.
    """
    check_linears(decoder, spec)
    check_tables(decoder, spec)
    if not spec.is_calibrated:
        rounding = Nearest(spec.group_size)
        for layer in (f"layers.{n}" for n in range(len(decoder.layers))):
            decoder.read_part(layer, read)
            quantize_linears(decoder, spec, linear_names(decoder, f"{layer}."), rounding)
        decoder.read_part("norm", read)
        quantize_tables(decoder, spec, rounding, read)
        return
    assert ids is not None, "smoothing and GPTQ follow the inputs of the model"

    def cuts(site: str, channels: int) -> list[int]:
        return stretches(channels, spec.group_size) if _rounded_by_gptq(spec, site) else []

    def rounding_at(site: str, inputs: calibration.Inputs) -> Rounding:
        by_gptq = _rounded_by_gptq(spec, site)
        return Gptq(inputs.moments, spec.group_size) if by_gptq else Nearest(spec.group_size)

    for n, inputs in calibration.observe(decoder, ids, cuts, read):
        if n is None:
            release_freed_memory()  # of the layers' floats
            head = inputs[calibration.HEAD]
            if spec.smooth and spec.head != "none":
                smoothing.fold_head(decoder, head)
            quantize_tables(decoder, spec, rounding_at(calibration.HEAD, head), read)
            continue
        users = calibration.sites(decoder.layers[n])
        if spec.smooth and spec.linear != "none":
            smoothing.fold_layer(decoder.layers[n], inputs)
        for site, names in users.items():
            full = [f"layers.{n}.{name}" for name in names]
            quantize_linears(decoder, spec, full, rounding_at(site, inputs[site]))


def _rounded_by_gptq(spec: QuantizationSpec, site: str) -> bool:
    """Whether what meets this input is rounded by GPTQ."""
    if spec.rounding != "gptq":
        return False
    return spec.head != "none" if site == calibration.HEAD else spec.linear != "none"
