"""LEAF: the peers, in order of importance: what each needs installed, how a model is converted, what it can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = {"gemma3_270m": "Gemma 3 270M", "smollm2_135m": "SmolLM2 135M Instruct"}
LENGTHS = {"gemma3_270m": (128, 512, 2048, 8192, 32000), "smollm2_135m": (128, 512, 2048, 8000)}
"""Tokens in the cache; SmolLM2's context is 8192, and the decoded tokens must fit too."""
STATIC_CONTEXT = 2176
"""Tokens in the caches of programs that allocate them at once: the 2048 at which all are compared, and room to
decode."""
LOG_PROBABILITIES = "log_probabilities.npy"
"""A file of a model's reference: float32's log-probabilities at every scored position."""

Command = Callable[[Path, Path, Path], list[str]]


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        title: as the tables name it, with how it keeps the weights.
        requirements: what pip installs into its environment, pinned.
        remove: distributions that pip also installs and that must be removed.
        variables: of the environment while installing.
        convert: from the environment's directory of programs, a checkpoint and an empty directory, the command that
            fills it; None where the peer runs the GGUF itself.
        longest: tokens it can take; None where there is no limit but the model's.
    """

    name: str
    title: str
    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    convert: Command | None = None
    longest: int | None = None

    def environment(self, root: Path) -> Path:
        return root / self.name / "venv"

    def python(self, root: Path) -> Path:
        return self.environment(root) / "bin" / "python"

    def model(self, root: Path, model: str) -> Path:
        """Where the converted model is."""
        return root / self.name / model


def _openvino(programs: Path, checkpoint: Path, out: Path) -> list[str]:
    task = ["--task", "text-generation-with-past", "--weight-format", "int8"]
    return [str(programs / "optimum-cli"), "export", "openvino", "--model", str(checkpoint), *task, str(out)]


def _onnxruntime(programs: Path, checkpoint: Path, out: Path) -> list[str]:
    precision = ["-p", "int4", "-e", "cpu", "-c", str(out.parent / "cache")]
    script = HERE / "convert_onnxruntime.py"
    return [str(programs / "python"), str(script), "-i", str(checkpoint), "-o", str(out), *precision]


def _optimum_executorch(programs: Path, checkpoint: Path, out: Path) -> list[str]:
    task = ["--task", "text-generation", "--recipe", "xnnpack", "--use_custom_sdpa", "--use_custom_kv_cache"]
    sizes = ["--qlinear", "8da4w", "--qembedding", "8w", "--max_seq_len", str(STATIC_CONTEXT)]
    command = [str(programs / "optimum-cli"), "export", "executorch", "--model", str(checkpoint)]
    return [*command, *task, *sizes, "--output_dir", str(out)]


def _litert(programs: Path, checkpoint: Path, out: Path) -> list[str]:
    script = HERE / "convert_litert.py"
    return [str(programs / "python"), str(script), str(checkpoint), str(out), str(STATIC_CONTEXT)]


PEERS = (
    Peer(
        "openvino",
        "OpenVINO GenAI int8",
        (
            "torch==2.13.0",
            "transformers==5.0.0",
            "optimum==2.3.0",
            "optimum-intel[openvino]==2.2.0",
            "nncf==3.4.0",
            "openvino==2026.4.1",
            "openvino-tokenizers==2026.4.1.0",
            "openvino-genai==2026.4.1.0",
        ),
        remove=("torchvision",),  # built for CUDA: beside a CPU build of torch, Transformers fails on importing it
        convert=_openvino,
    ),
    Peer(
        "llama_cpp",
        "llama.cpp, the GGUF itself",
        ("llama-cpp-python==0.3.36", "numpy==2.4.6"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
    Peer(
        "onnxruntime",
        "onnxruntime-genai int4",
        (
            "torch==2.13.0",
            "transformers==5.24.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "onnxruntime==1.32.0",
            "onnxruntime-genai==0.18.0",
        ),
        convert=_onnxruntime,
        longest=4096,  # it keeps logits of the whole prompt: a megabyte a token for Gemma
    ),
    Peer(
        "optimum_executorch",
        "optimum-executorch 8da4w",
        (
            "torch==2.13.0",
            "torchao==0.18.0",
            "executorch==1.5.1",
            "transformers==5.0.0rc1",
            "optimum-executorch==1.1.0",
        ),
        convert=_optimum_executorch,
        longest=STATIC_CONTEXT - 64,
    ),
    Peer(
        "litert",
        "LiteRT int8",
        (
            "torch==2.13.0",
            "torchao==0.18.0",
            "transformers==5.24.0",
            "litert-torch==0.10.0",
            "ai-edge-litert==2.3.0",
            "ai-edge-quantizer==0.10.0",
            "litert-converter==0.5.0",
            "litert-lm-builder==0.18.1",
        ),
        convert=_litert,
        longest=STATIC_CONTEXT - 64,
    ),
)
