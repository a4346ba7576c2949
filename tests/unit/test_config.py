"""The YAML of an export: what it accepts, and what each mistake says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.backends.executorch.options import ExecutorchOptions
from exporter.config import CheckpointConfig, load_config, resolve
from exporter.errors import ConfigError
from exporter.families import from_hf
from exporter.spec import PRESETS, QuantizationSpec

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"name": "tiny", "checkpoint": {"path": "weights"}}


def write(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return path


def refused(tmp_path: Path, data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, data))
    return str(caught.value)


def test_defaults_and_paths_relative_to_the_yaml(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.checkpoint.path == tmp_path / "weights"
    assert config.max_context_length is None
    assert config.max_prefill_chunk == 512
    assert config.targets == ("executorch",)
    floats = QuantizationSpec(linear="none", embedding="none", head="none")
    assert config.options("executorch") == ExecutorchOptions(quantization=floats, kernels="ring")
    assert config.cache.ring_slack == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_mapping_it_stands_for(tmp_path: Path, name: str) -> None:
    preset = load_config(write(tmp_path, MINIMAL | {"executorch": {"quantization": name}}))
    options = preset.options("executorch")
    assert options == ExecutorchOptions(quantization=PRESETS[name])
    mapping = PRESETS[name].model_dump(mode="json")
    assert load_config(write(tmp_path, MINIMAL | {"executorch": {"quantization": mapping}})) == preset
    shipped = write(tmp_path, MINIMAL | {"executorch": {"quantization": {"linear": "int8"}}})
    assert load_config(shipped, {"executorch.quantization": name}) == preset


def test_absolute_paths_stay(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL | {"checkpoint": {"path": "/elsewhere/x.gguf", "cache_dir": "c"}}))
    assert config.checkpoint.path == Path("/elsewhere/x.gguf")
    assert config.checkpoint.cache_dir == tmp_path / "c"


def test_an_unknown_key_is_named_with_the_allowed_ones(tmp_path: Path) -> None:
    message = refused(tmp_path, MINIMAL | {"max_contxt_length": 5})
    assert "'max_contxt_length' in the top level" in message
    assert "max_context_length" in message
    assert "max_prefill_chunk" in message


@pytest.mark.parametrize(
    ("section", "allowed"),
    [
        ("checkpoint", "package_files"), ("cache", "ring_slack"), ("executorch", "kernels"), ("coreml", "weights"),
        ("coreai", "keep_int8"),
    ],
)  # fmt: skip
def test_an_unknown_key_deeper_down(tmp_path: Path, section: str, allowed: str) -> None:
    message = refused(tmp_path, MINIMAL | {section: MINIMAL.get(section, {}) | {"colour": "red"}})
    assert f"'colour' in {section}" in message
    assert allowed in message


def test_an_unknown_key_of_a_section_of_a_section(tmp_path: Path) -> None:
    message = refused(tmp_path, MINIMAL | {"executorch": {"quantization": {"colour": "red"}}})
    assert "'colour' in executorch.quantization" in message
    assert "group_size" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "bfloat16"}, ["dtype = 'bfloat16'", "float32"]),
        ({"max_prefill_chunk": 1}, ["max_prefill_chunk = 1", "greater than or equal to 2"]),
        ({"max_prefill_chunk": True}, ["max_prefill_chunk = True", "integer"]),
        ({"max_context_length": "long"}, ["max_context_length = 'long'", "integer"]),
        ({"targets": []}, ["targets = []", "at least one target"]),
        ({"targets": ["executorch", "executorch"]}, ["each named once"]),
        ({"targets": ["tflite"]}, ["targets = ['tflite']", "some of executorch, coreai, coreml, not 'tflite'"]),
        ({"name": "../escape"}, ["name = '../escape'"]),
        ({"cache": {"growth": "triple"}}, ["cache.growth = 'triple'", "double"]),
        ({"quantization": "accurate"}, ["'quantization' in the top level", "executorch"]),
        (
            {"executorch": {"quantization": {"linear": "int3"}}},
            ["executorch.quantization = {'linear': 'int3'}", "linear one of none, int4, ", "int8"],
        ),
        ({"executorch": {"quantization": {"head": "float16"}}}, ["head one of none, int4, "]),
        ({"coreml": {"weights": "int3"}}, ["coreml.weights = 'int3'", "one of float16, float32, int4, "]),
        ({"coreai": {"weights": "none"}}, ["coreai.weights = 'none'", "one of float16, float32, int4, "]),
        (
            {"executorch": {"quantization": "tiny"}},
            ["executorch.quantization = 'tiny'", "one of none, accurate, balanced, small, or a mapping"],
        ),
        ({"executorch": {"quantization": {"smooth": True}}}, ["a quantised linear or head for smooth"]),
        ({"executorch": {"kernels": "fast"}}, ["executorch.kernels = 'fast'", "ring", "stock"]),
        ({"checkpoint": {}}, ["exactly one of path and package_files"]),
        ({"checkpoint": {"path": "a", "package_files": ["b:c"]}}, ["exactly one of path and package_files"]),
        ({"checkpoint": {"package_files": []}}, ["at least one module:relative/path"]),
        ({"checkpoint": {"package_files": ["no_colon"]}}, ["module:relative/path"]),
        ({"checkpoint": {"package_files": ["a.b:c"]}}, ["top-level module"]),
        ({"checkpoint": {"package_files": ["a:../../etc/passwd"]}}, ["no '..'"]),
        ({"checkpoint": {"package_files": ["a:/etc/passwd"]}}, ["module:relative/path"]),
        ({"checkpoint": {"path": "a", "sha256": "ABC"}}, ["checkpoint.sha256 = 'ABC'"]),
    ],
)
def test_a_bad_value_names_field_and_expectation(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    message = refused(tmp_path, MINIMAL | change)
    for word in words:
        assert word in message


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, {"checkpoint": {"path": "a"}, "dtype": "int4", "speed": 9})
    assert "no name" in message
    assert "dtype = 'int4'" in message
    assert "'speed'" in message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "an empty file"),
        ("# only a comment\n", "an empty file"),
        ("- a\n- b\n", "a list"),
        ("name: [unclosed", "invalid YAML"),
        ("name: a\nname: b\ncheckpoint: {path: x}\n", "key 'name' twice"),
        ("name: !!python/object/apply:os.system ['true']\n", "invalid YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, word: str) -> None:
    assert word in refused(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_resolve_settles_the_context(tmp_path: Path) -> None:
    _, spec = from_hf({"model_type": "llama", "max_position_embeddings": 64})
    config = load_config(write(tmp_path, MINIMAL))
    assert resolve(config, spec).max_context_length == 64
    assert resolve(config, spec).max_prefill_chunk == 64
    shorter = config.model_copy(update={"max_context_length": 32, "max_prefill_chunk": 16})
    assert resolve(shorter, spec).max_context_length == 32
    assert resolve(shorter, spec).max_prefill_chunk == 16
    with pytest.raises(ConfigError, match=r"max_context_length = 65; expected at most 64"):
        resolve(config.model_copy(update={"max_context_length": 65}), spec)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_load(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert config.checkpoint.license


def test_checkpoint_config_is_usable_from_python() -> None:
    assert CheckpointConfig(path=Path("x.gguf")).package_files is None
