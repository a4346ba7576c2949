"""Core AI assets, run by the wheel's interpreter: the numbers and every row of state are those of the eager decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny_checkpoints
import tiny_models
import torch
from coreai_models import CHUNK, CONTEXT, Pair, build_into, stacked, stacked_states
from tiny_models import one_thread  # noqa: F401

from exporter.backends import Built
from exporter.backends.coreai.checks import check_asset
from exporter.backends.coreai.description import describe
from exporter.backends.coreai.file import read_file
from exporter.backends.coreai.runtime import AimodelProgram
from exporter.cache.plain import PlainKernels
from exporter.checkpoint import open_checkpoint
from exporter.errors import BundleError, ConfigError, RuntimeLimitError
from exporter.graph import ProgramContract
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.programs import Limits
from exporter.spec import ModelSpec
from runtime_ref.programs import CheckedProgram

# Rings of 8 rows: single tokens first, chunks longer than the ring, chunks that straddle its end, 7 turns in all.
PIECES = (1, 1, 2, 5, 20, 1, 1, 7, 3, 1, 17, 1)
assert sum(PIECES) <= CONTEXT and max(PIECES) <= CHUNK
# Measured: 2.1e-5 at most in logits of up to 4.7, and in states.
CLOSE = 5e-5


def spec_of(name: str) -> ModelSpec:
    return {
        **tiny_models.SPECS,
        "convolutions": tiny_models.model(tiny_models.CONV, tiny_models.SLIDING, tiny_models.CONV, tiny_models.GLOBAL),
    }[name]


def worst(pair: Pair, pieces: Sequence[int] = PIECES) -> float:
    """The largest difference of logits over calls of these lengths; states are compared after every call."""
    ids, start, largest = tiny_models.token_ids(sum(pieces)), 0, 0.0
    for length in pieces:
        ours, theirs = pair.call(ids[start : start + length])
        start += length
        largest = max(largest, float((ours - theirs).abs().max()))
        assert not any(difference > CLOSE for difference in pair.state_differences()), (start, pair.state_differences())
    return largest


@pytest.mark.parametrize(
    ("name", "slack"),
    [
        ("window 1", 3), ("own heads for each kind", 0), ("sinks and experts", 0),
        ("convolutions", 0),
    ],
)  # fmt: skip
def test_every_kind_of_layer_agrees_with_eager(name: str, slack: int, tmp_path: Path) -> None:
    decoder = stacked(spec_of(name), slack)
    assert worst(Pair(decoder, build_into(decoder, tmp_path), tmp_path)) < CLOSE


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen2", "qwen3"])
def test_a_checkpoint_agrees_with_eager(model_type: str, tmp_path: Path) -> None:
    """From the files of a family to the program. What the others have is a part of these."""
    two = {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma3_text" else {}
    tiny_checkpoints.tiny_model(model_type, num_hidden_layers=2, **two).save_pretrained(tmp_path / "checkpoint")
    checkpoint = open_checkpoint(tiny_checkpoints.at(tmp_path / "checkpoint"))
    weights = checkpoint.load_state_dict(parameter_shapes(checkpoint.spec), lambda done, total: None)
    decoder = Decoder.from_state_dict(checkpoint.spec, stacked_states(checkpoint.spec), PlainKernels(), weights)
    assert worst(Pair(decoder, build_into(decoder, tmp_path), tmp_path)) < CLOSE


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Built, Path]:
    directory = tmp_path_factory.mktemp("coreai")
    decoder = stacked(spec_of("gemma"))
    return decoder, build_into(decoder, directory), directory


def test_how_a_prompt_is_cut_changes_nothing(tiny_gemma: tuple[Decoder, Built, Path]) -> None:
    whole, ones = Pair(*tiny_gemma), Pair(*tiny_gemma)
    ids = tiny_models.token_ids(31)
    for token in ids:
        stepped, _ = ones.call([token])
    whole.call(ids[:20])
    chunked, _ = whole.call(ids[20:])
    assert float((stepped - chunked).abs().max()) < CLOSE
    for ours, theirs in zip(whole.states[0], ones.states[0], strict=True):
        rows = min(31, ours.shape[1], theirs.shape[1])
        assert float((ours[:, :rows] - theirs[:, :rows]).abs().max()) < CLOSE


def test_growing_changes_no_bit(tiny_gemma: tuple[Decoder, Built, Path]) -> None:
    """16 rows that double as they fill, beside the whole context allocated at once."""
    growing, whole = Pair(*tiny_gemma), Pair(*tiny_gemma)
    whole.length = CONTEXT
    whole._grow()
    whole.length = 0
    ids = tiny_models.token_ids(40)
    for start, length in ((0, 15), (15, 1), (16, 1), (17, 23)):
        ours, _ = growing.call(ids[start : start + length])
        theirs, _ = whole.call(ids[start : start + length])
        assert torch.equal(ours, theirs)
    assert [state.shape[1] for state in growing.states[0]] == [64, 64, 8, 8]


def test_a_ring_of_real_size(tmp_path: Path) -> None:
    """Its index constants are stored like weights, beside the text, and the checks read them all the same."""
    decoder = stacked(tiny_models.model(tiny_models.attention(512)), context=1200)
    limits = Limits(max_context_length=1200, max_prefill_chunk=600)
    pair = Pair(decoder, build_into(decoder, tmp_path, limits=limits), tmp_path)
    assert worst(pair, (1, 600, 300, 1)) < CLOSE


def test_the_interface_and_the_files(tiny_gemma: tuple[Decoder, Built, Path]) -> None:
    _, built, _ = tiny_gemma
    program = built.program
    assert (program.format, program.file, program.weights) == ("coreai", "model.aimodel", "float32")
    assert {t.dtype for method in program.methods.values() for t in method.inputs[:2]} == {"int32"}
    assert {check.name for check in built.checks} >= {"writes_land_on_their_rows", "weights_stored_once"}


def test_describe_reads_the_file_alone(tiny_gemma: tuple[Decoder, Built, Path]) -> None:
    decoder, _, directory = tiny_gemma
    description = describe(read_file(directory / "model.aimodel"))
    prefill, main = description.functions
    assert (prefill.name, main.name) == ("prefill", "main")
    assert prefill.inputs == (("input_ids", "int32", "[1, 2..24]"), ("position_ids", "int32", "[1, 2..64]"))
    assert main.inputs == (("input_ids", "int32", "[1, 1]"), ("position_ids", "int32", "[1, 1..64]"))
    assert main.states[0] == ("globalKeyCache", "float32", "[1, 2..64, 2, 16]")
    assert main.states[2] == ("slidingKeyCache", "float32", "[1, 8, 2, 16]")
    assert main.outputs == (("logits", "float32", "[1, 97]"),)
    assert main.operators["slice_update"] == 4
    matrices = sum(p.numel() for p in decoder.parameters() if p.ndim > 1)  # the tied embedding once
    assert description.weight_bytes == {"float32": 4 * matrices}
    assert description.file_bytes < 4 * matrices + 90_000  # the instructions of two functions


def test_ranges_are_recorded_in_the_asset_and_held_to_the_contract(
    tiny_gemma: tuple[Decoder, Built, Path], tmp_path: Path
) -> None:
    decoder, built, directory = tiny_gemma
    contracts = [ProgramContract(name, method, decoder.states) for name, method in built.program.methods.items()]
    path = tmp_path / "model.aimodel"
    shutil.copytree(directory / "model.aimodel", path)
    metadata = json.loads((path / "metadata.json").read_text())
    metadata["creatorDefinedMetadata"]["dynamicRanges"]["prefill"]["input_ids"][1] = [2, 25]
    (path / "metadata.json").write_text(json.dumps(metadata))
    assert describe(read_file(path)).functions[0].inputs[0] == ("input_ids", "int32", "[1, 2..25]")
    failed = [(check.program, check.name) for check in check_asset(read_file(path), contracts) if not check.passed]
    assert failed == [("prefill", "dynamic_ranges")]
    (path / "metadata.json").unlink()  # as another exporter's asset may be: the axes are dynamic, and no more is known
    assert describe(read_file(path)).functions[0].inputs[0] == ("input_ids", "int32", "[1, any]")
    assert all(check.passed for check in check_asset(read_file(path), contracts))


def rounded(weight: torch.Tensor, grid: str) -> torch.Tensor:
    """What the file stands for, from the definition: int8 covers -max..max of a row, int4 min..max of 32 channels.

    coreai-opt 0.3.0 adds 1e-6 to the range.
    """
    if grid == "float16":
        return weight.half().float()
    if grid == "int8":
        scale = weight.abs().amax(-1, keepdim=True) / 127
        return (weight / scale).round().clamp(-127, 127) * scale
    blocks = weight.view(weight.shape[0], -1, 32)
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low + 1e-6) / 15
    zero = ((-8 * high - 7 * low) / (high - low + 1e-6)).round().clamp(-8, 7)
    return ((((blocks / scale).round() + zero).clamp(-8, 7) - zero) * scale).view_as(weight)


@pytest.mark.parametrize(
    ("weights", "keep_int8", "tied"),
    [("float16", (), True), ("int8", (), False), ("int4", (), True), ("int4", ("embed", "v_proj", "down_proj"), True)],
)
def test_reduced_weights_are_the_rounding_they_say(
    weights: str, keep_int8: tuple[str, ...], tied: bool, tmp_path: Path
) -> None:
    """Stored once and small, embedding and head too; run, they are a model whose matrices were rounded here."""
    spec = tiny_models.model(tiny_models.SLIDING, tie_word_embeddings=tied)
    decoder, expected = stacked(spec), stacked(spec)
    elements = {"float16": 0, "int8": 0, "int4": 0}
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if parameter.ndim > 1:
                grid = "int8" if any(part in name for part in keep_int8) else weights
                parameter.copy_(rounded(parameter, grid))
                elements[grid] += parameter.numel()
    built = build_into(decoder, tmp_path, weights, keep_int8=keep_int8)
    wanted = {"weights": weights, "keep_int8": list(keep_int8), "max_kl_divergence": None}
    assert built.program.options == wanted
    assert built.program.weights == (f"{weights}, int8 in {' '.join(keep_int8)}" if keep_int8 else weights)
    assert worst(Pair(expected, built, tmp_path), (1, 20, 1, 5)) < CLOSE
    stored = describe(read_file(tmp_path / "model.aimodel")).weight_bytes
    assert stored.get("float16", 0) == 2 * elements["float16"] and stored.get("int8", 0) == elements["int8"]
    assert 0 <= stored.get("int4", 0) - elements["int4"] // 2 <= elements["int4"] // 64  # and zero points
    rows = sum(p.shape[0] for p in decoder.parameters() if p.ndim > 1)
    scales = 0 if weights == "float16" else rows + elements["int4"] // 32
    assert stored.get("float32", 0) <= 4 * scales  # short ones stand in the program's text
    assert sum(stored.values()) <= built.program.recipe.stored_bytes


def test_a_block_of_equal_weights_is_stored_as_one_number_and_read_back_as_all(tmp_path: Path) -> None:
    """Codes, scales and zero points may each be constant, and four bits of them no byte."""
    decoder = stacked(tiny_models.model(tiny_models.SLIDING))
    with torch.no_grad():
        decoder.layers[0].mixer.o_proj.weight.fill_(0.25)  # type: ignore[index]
        decoder.layers[0].mixer.q_proj.weight.zero_()  # type: ignore[index]
    expected = stacked(tiny_models.model(tiny_models.SLIDING))
    with torch.no_grad():
        for parameter, own in zip(expected.parameters(), decoder.parameters(), strict=True):
            parameter.copy_(rounded(own, "int4") if own.ndim > 1 else own)
    built = build_into(decoder, tmp_path, "int4", keep_int8=())
    assert worst(Pair(expected, built, tmp_path), (1, 9, 1)) < CLOSE


def test_chunks_go_through_prefill_and_single_tokens_through_main(tiny_gemma: tuple[Decoder, Built, Path]) -> None:
    pair = Pair(*tiny_gemma)
    program = CheckedProgram(pair.program)
    before = [state.clone() for state in pair.states[0]]
    with pytest.raises(RuntimeLimitError, match="exactly 1"):
        program.run("main", torch.tensor([[1, 2]]), torch.arange(2)[None], pair.states[0])
    with pytest.raises(RuntimeLimitError, match="2 or more"):
        program.run("prefill", torch.tensor([[1]]), torch.arange(1)[None], pair.states[0])
    pairs = zip(before, pair.states[0], strict=True)
    assert all(torch.equal(a, b) or bool(a.isnan().all()) for a, b in pairs)


def test_rings_of_two_sizes_do_not_share_a_stack() -> None:
    with pytest.raises(ConfigError, match="slidingKeyCache"):
        stacked(tiny_models.SPECS["two windows"])


def damaged(path: Path) -> None:
    (path / "main.mlirb").write_bytes(b"no bytecode at all")


def emptied(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize("damage", [damaged, emptied])
def test_a_damaged_asset_is_refused_by_everyone(
    damage: Callable[[Path], None], tiny_gemma: tuple[Decoder, Built, Path], tmp_path: Path
) -> None:
    _, built, directory = tiny_gemma
    path = tmp_path / "model.aimodel"
    path.mkdir()
    for file in (directory / "model.aimodel").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    damage(path)
    for read in (read_file, lambda path: AimodelProgram(path, built.program)):
        with pytest.raises(BundleError, match=r"model\.aimodel"):
            read(path)
