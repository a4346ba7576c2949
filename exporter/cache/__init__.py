"""Caches whose memory the caller owns: `RingKVCache` for sliding layers, `FullKVCache` for global ones, their masks."""

from exporter.cache.interface import CacheKernels, Extras, KVCache, RingCache
from exporter.cache.masks import concat_window_causal_mask, ring_window_causal_mask
from exporter.cache.plain import FullKVCache, PlainKernels, RingKVCache

__all__ = [
    "CacheKernels",
    "Extras",
    "FullKVCache",
    "KVCache",
    "PlainKernels",
    "RingCache",
    "RingKVCache",
    "concat_window_causal_mask",
    "ring_window_causal_mask",
]
