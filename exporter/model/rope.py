"""Rotary position embedding, half-split layout.

Letters: B batch, Q query_len, H heads, D head_dim, R rotary_dim.
Frequencies are computed in float32 step by step as Transformers does, so that tables agree to the bit.
"""

from __future__ import annotations

import math

import torch

from exporter.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Inverse frequencies ``[R/2]`` float32 and the factor on cos and sin.

    On the CPU whatever the default device: a decoder is built on the meta device and only its parameters are loaded.
    Formulas: linear position interpolation (Chen et al. 2023), Llama 3.1's wavelength bands, YaRN (Peng et al. 2023).
    """
    exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64, device="cpu").float() / spec.rotary_dim
    inv_freq = 1.0 / (spec.theta**exponent)
    if spec.scaling == "linear":
        return inv_freq / spec.factor, 1.0
    if spec.scaling == "llama3":
        return _llama3(inv_freq, spec), 1.0
    if spec.scaling == "yarn":
        return _yarn(spec)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, the band between is blended."""
    assert spec.low_freq_factor is not None and spec.high_freq_factor is not None
    assert spec.original_max_position_embeddings is not None
    original = spec.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / spec.low_freq_factor, inv_freq / spec.factor, inv_freq)
    smooth = (original / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * scaled / spec.factor + smooth * scaled
    short = wavelength < original / spec.high_freq_factor
    long = wavelength > original / spec.low_freq_factor
    return torch.where(~short & ~long, blended, scaled)


def _yarn(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Interpolated below the ramp, extrapolated above it; the attention factor defaults to ``0.1 ln(factor) + 1``."""
    assert spec.original_max_position_embeddings is not None
    dim, theta, original = spec.rotary_dim, spec.theta, spec.original_max_position_embeddings
    beta_fast = 32.0 if spec.beta_fast is None else spec.beta_fast
    beta_slow = 1.0 if spec.beta_slow is None else spec.beta_slow

    def channel(rotations: float) -> float:  # the channel that turns `rotations` times within the original context
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(beta_fast), channel(beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    extrapolation, interpolation = 1.0 / powers, 1.0 / (spec.factor * powers)
    keep = 1 - ramp
    inv_freq = interpolation * (1 - keep) + extrapolation * keep
    if spec.attention_factor is not None:
        return inv_freq, spec.attention_factor
    return inv_freq, 0.1 * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0


class RotaryTable(torch.nn.Module):
    """cos and sin of one RopeSpec, computed once a call and shared by every layer that uses it."""

    inv_freq: torch.Tensor

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        inv_freq, self.factor = inverse_frequencies(spec)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions float32 ``[Q]`` -> cos, sin ``[1, Q, 1, R/2]``."""
        angles = (positions[:, None] * self.inv_freq[None, :])[None, :, None, :]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R channels of ``[B, Q, H, D]``; channel i pairs with channel i + R/2."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, -1)
