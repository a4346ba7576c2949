"""What an export costs by the size of the model: CPU seconds and memory of random models in the shapes of Gemma 3.

``python bench/export_scaling.py`` writes docs/results/export-scaling.json; about 20 minutes. Neither cost depends on
the values of the weights, so they are random; the tokenizer is Gemma's own.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from measuring import RESULTS, Results
from peers.cost import finish

from exporter.quantization.gptq import stretches
from exporter.quiet import quieten_libraries

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "Gemma 3 270M": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
    "Gemma 3 1B": {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
}
LARGE = {
    "32 layers, vocabulary 128,256, head of its own": (32, 128256, 2),
    "36 layers, vocabulary 262,144, tied": (36, 262144, 1),
}
"""8B models of hidden size 4096, inner size 14336, 8 KV heads of 128: layers, vocabulary, tables."""
STD = 0.02
CONFIG = """\
name: random
checkpoint: {{path: {path}}}
max_context_length: 32768
executorch: {{quantization: {quantization}}}
"""
STEP = re.compile(r"^  (\S.*?)\s+[\d.]+ s   peak ")
SAMPLE_SECONDS = 0.05
MEMORY = ("VmRSS", "RssAnon")


def tensors(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, as Hugging Face has them."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, size = GEMMA["num_attention_heads"], GEMMA["head_dim"]
    assert isinstance(heads, int) and isinstance(size, int) and isinstance(GEMMA["vocab_size"], int)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (size, hidden),
        "self_attn.v_proj": (size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer |= dict.fromkeys(norms, (hidden,))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (GEMMA["vocab_size"], hidden)}
    for n in range(shape["num_hidden_layers"]):
        found |= {f"model.layers.{n}.{name}.weight": one for name, one in layer.items()}
    return found | {"model.norm.weight": (hidden,)}


def write_checkpoint(directory: Path, shape: dict[str, int], tokenizer: Path) -> int:
    """A Hugging Face directory of `shape` in bfloat16 with the files in `tokenizer`; the number of weights."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(tokenizer, directory)
    (directory / "config.json").write_text(json.dumps(GEMMA | shape))
    torch.manual_seed(0)
    weights = {name: (torch.randn(one) * STD).bfloat16() for name, one in tensors(shape).items()}
    save_file(weights, directory / "model.safetensors")
    return sum(weight.numel() for weight in weights.values())


def write_gemma_tokenizer(directory: Path) -> None:
    """The tokenizer that the GGUF of configs/gemma3_270m.yaml carries."""
    from exporter.config import load_config
    from exporter.source import open_source
    from exporter.tokenizer import write_tokenizer

    directory.mkdir()
    write_tokenizer(open_source(load_config(Path("configs/gemma3_270m.yaml"))).checkpoint, directory)


def in_fork(work: Any, *arguments: Any) -> Any:
    """`work`'s result from a process of its own: this one stays small, or its size would be a child's peak."""
    from multiprocessing import get_context

    with get_context("spawn").Pool(1, quieten_libraries) as pool:
        return pool.apply(work, arguments)


def watch(pid: int, current: list[str], peaks: dict[str, dict[str, int]]) -> None:
    """Until process `pid` ends: the largest resident set, and the anonymous part of it, in each step (bytes)."""
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        now = {key: int(value.split()[0]) * 1024 for key, value in (x.split(":", 1) for x in lines) if key in MEMORY}
        if not now:  # a process that has ended and was not waited for
            return
        seen = peaks.setdefault(current[0], dict.fromkeys(MEMORY, 0))
        for key in MEMORY:
            seen[key] = max(seen[key], now[key])
        time.sleep(SAMPLE_SECONDS)


def cpu_seconds(pid: int) -> float:
    """What process `pid` has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def export(checkpoint: Path, quantization: str, out: Path) -> dict[str, Any]:
    """Export in a process of its own: its CPU seconds and peak, and those of each step; imports are the first one's."""
    config = checkpoint.parent / "random.yaml"
    config.write_text(CONFIG.format(path=checkpoint, quantization=quantization))
    command = [sys.executable, "-m", "exporter", "export", "--model", str(config), "--out", str(out)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    current, before = ["at first"], 0.0
    peaks: dict[str, dict[str, int]] = {}
    steps: list[dict[str, Any]] = []
    said: list[str] = []
    sampler = threading.Thread(target=watch, args=(child.pid, current, peaks))
    sampler.start()
    assert child.stderr is not None
    for line in child.stderr:
        said.append(line)
        if match := STEP.match(line):  # a step's name is known when it is over
            running, current[0] = current[0], f"after {len(steps)}"
            seconds = cpu_seconds(child.pid)
            steps.append({"step": match[1], "cpu_seconds": seconds - before, **peaks.get(running, {})})
            before = seconds
    code, used = finish(child)
    sampler.join()
    if code:
        raise SystemExit("".join(said))
    return {
        **used,
        "file_bytes": (out / "model.pte").stat().st_size,
        "steps": steps,
    }


def parts(shape: dict[str, int]) -> tuple[int, int, int]:
    """Weights in all, of one table and of one layer."""
    counts = {name: math.prod(size) for name, size in tensors(shape).items()}
    layer = sum(count for name, count in counts.items() if name.startswith("model.layers.0."))
    return sum(counts.values()), counts["model.embed_tokens.weight"], layer


def held(whole: int, table_weights: int, layer: int) -> int:
    """Bytes that an export must hold by construction: every weight as an integer, one table and one layer in float32,
    or, while the program is loaded, what was packed and the pages of the file it was packed from."""
    return max(whole + 4 * (table_weights + layer), 2 * whole)


def followed(hidden: int, inner: int) -> int:
    """Bytes that GPTQ holds beside a layer as wide: the moments of its four inputs, three of which have the hidden
    size, and the factors of the widest, in the orders of int8 and of int4."""

    def squares(channels: int) -> int:
        return 4 * sum(size**2 for size in stretches(channels, 32))

    return 3 * squares(hidden) + 3 * squares(inner)


def large_models() -> list[dict[str, Any]]:
    """Of the 8B shapes: weights in all, of a table and of a layer, and the bytes held by construction, GPTQ's too."""
    found = []
    for name, (layers, vocabulary, tables) in LARGE.items():
        layer, one = 4096 * (2 * 4096 + 2 * 8 * 128 + 3 * 14336), vocabulary * 4096
        whole = layers * layer + tables * one
        bound = held(whole, one, layer) + followed(4096, 14336)
        found.append({"name": name, "weights": whole, "table": one, "layer": layer, "held_bytes": bound})
    return found


def cost(shape: dict[str, int], tokenizer: Path, quantization: str, work: Path) -> dict[str, Any]:
    """Write, export and remove one model."""
    folder = work / "model"
    weights = in_fork(write_checkpoint, folder, shape, tokenizer)
    try:
        taken = export(folder, quantization, work / "bundle")
        return {"shape": shape, "weights": weights, "held_bytes": held(*parts(shape)), **taken}
    finally:
        for path in (folder, work / "bundle"):
            shutil.rmtree(path, ignore_errors=True)


def main(
    models: Annotated[str, typer.Option(help="Layers in the shape of Gemma 3 270M, or 1B.")] = "6,12,18,36,1B",
    quantization: Annotated[str, typer.Option(help="A preset.")] = "accurate",
    work: Annotated[Path | None, typer.Option(help="Where models are put (8 GB are needed); a temporary one.")] = None,
    out: Annotated[Path, typer.Option(help="The results as JSON.")] = RESULTS / "export-scaling.json",
) -> None:
    small = SHAPES["Gemma 3 270M"]
    asked = {
        name: SHAPES["Gemma 3 1B"] if name == "1B" else small | {"num_hidden_layers": int(name)}
        for name in models.split(",")
    }
    results = Results(out, keep=False)
    results.own |= {"quantization": quantization, "rows": {}, "large": large_models()}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        tokenizer = Path(folder) / "tokenizer"
        in_fork(write_gemma_tokenizer, tokenizer)
        for name, shape in asked.items():
            print(name, flush=True)
            results.own["rows"][name] = cost(shape, tokenizer, quantization, Path(folder))
            results.save()


if __name__ == "__main__":
    typer.run(main)
