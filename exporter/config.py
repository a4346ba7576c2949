"""The YAML file of one export: `load_config` reads it, `resolve` settles what depends on the model.

Every mistake of the user raises `ConfigError`, which says which field, what arrived, what was expected and how to
repair it. An unknown key is an error, at any depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from exporter.backends import formats, traits
from exporter.errors import ConfigError
from exporter.spec import CachePolicy, FormatOptions, ModelSpec
from exporter.yaml_text import parse_yaml

# A dotted module would make importlib import its parent package.
_PACKAGE_FILE = re.compile(r"[A-Za-z_]\w*:(?!/)(?!.*(?:^|[:/])\.\.(?:/|$)).+")

M = TypeVar("M", bound=BaseModel)


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointConfig(_Config):
    """Where the weights are: either `path` or `package_files`.

    `path` is a Hugging Face directory (safetensors) or a ``.gguf`` file, relative to the YAML file. `package_files` are
    files shipped in installed Python packages, ``module:relative/path``, joined in order when there are several.
    `sha256` is that of the resulting file and is verified; `cache_dir` is where joined files are kept
    (``~/.cache/ring-exporter`` when absent).
    """

    path: Path | None = None
    package_files: tuple[str, ...] | None = None
    cache_dir: Path | None = None
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    license: str | None = None

    @field_validator("package_files")
    @classmethod
    def _package_files_are_places(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("at least one module:relative/path")
        for item in value or ():
            if not _PACKAGE_FILE.fullmatch(item):
                raise ValueError(f"module:relative/path with a top-level module and no '..', not {item!r}")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> CheckpointConfig:
        if (self.path is None) == (self.package_files is None):
            raise ValueError("exactly one of path and package_files")
        return self


class ExportConfig(_Config):
    """One export. ``max_context_length: null`` means the model's own `max_position_embeddings`.

    `calibration` is a text file, relative to the YAML file, that calibrates in place of the texts that come with the
    exporter. A program that breaks the promise of its preset is refused unless `quality` is ``accept``.

    Every format has a section of its own, under its name: `options` (`CONFIG` is this model with those sections).
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    checkpoint: CheckpointConfig
    dtype: Literal["float32"] = "float32"
    max_context_length: StrictInt | None = Field(default=None, ge=2)
    max_prefill_chunk: StrictInt = Field(default=512, ge=2)
    cache: CachePolicy = CachePolicy()
    calibration: Path | None = None
    quality: Literal["promised", "accept"] = "promised"
    targets: tuple[str, ...] = formats()[:1]

    @field_validator("targets")
    @classmethod
    def _targets_are_a_set(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("at least one target, each named once")
        if unknown := [target for target in value if target not in formats()]:
            raise ValueError(f"some of {', '.join(formats())}, not {', '.join(map(repr, unknown))}")
        return value

    @model_validator(mode="after")
    def _caches_suit_the_targets(self) -> ExportConfig:
        for dtype in dict.fromkeys(self.cache.dtypes):
            lacking = [target for target in self.targets if dtype not in traits(target).cache_dtypes]
            if lacking:
                able = [traits(name).title for name in formats() if dtype in traits(name).cache_dtypes]
                both = [one for one in traits(lacking[0]).cache_dtypes]
                raise ValueError(
                    f"cache.dtype and cache.global_dtype {' or '.join(both)} for the targets {', '.join(lacking)}: "
                    f"{dtype} caches are {' and '.join(able)}'s"
                )
        return self

    def options(self, target: str) -> FormatOptions:
        """What the config says about one target."""
        options: FormatOptions = getattr(self, target)
        return options


CONFIG: type[ExportConfig] = create_model(
    "ExportConfig",
    __base__=ExportConfig,
    **{name: (traits(name).options, traits(name).options()) for name in formats()},  # type: ignore[call-overload]
)
"""The whole file: `ExportConfig` and a section for each format."""


def _model_at(root: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """The model under `root` that holds the key at the end of `place`."""
    model = root
    for part in place[:-1]:
        if isinstance(part, str):  # a number counts items of one kind
            model = _model_in(model.model_fields[part].annotation)
    return model


def _model_in(annotation: Any) -> type[BaseModel]:
    """The one model in an annotation: itself, the items of a tuple, or an optional one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [part for part in get_args(annotation) if part not in (Ellipsis, type(None))]
    assert len(found) == 1, f"{annotation} holds no model, or several"
    return _model_in(found[0])


def _explain(owner: str, error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """Pydantic's errors as one `ConfigError`."""
    got: list[str] = []
    expected: list[str] = []
    for item in error.errors():
        place = tuple(item["loc"])
        name = ".".join(str(part) for part in place)
        if item["type"] == "extra_forbidden":
            where = ".".join(str(part) for part in place[:-1]) or "the top level"
            got.append(f"unknown key {place[-1]!r} in {where}")
            expected.append(f"in {where} one of {', '.join(sorted(_model_at(root, place).model_fields))}")
        elif item["type"] == "missing":
            got.append(f"no {name}")
            expected.append(f"a value for {name}")
        elif not place:  # of the whole file: every value is valid by itself
            got.append("its keys and values together")
            expected.append(item["msg"].removeprefix("Value error, "))
        else:
            got.append(f"{name} = {item['input']!r}")
            expected.append(f"{name}: {item['msg'].removeprefix('Value error, ')}")
    return ConfigError(
        owner, got="; ".join(got), expected="; ".join(dict.fromkeys(expected)), repair="Correct the YAML file."
    )


def read_yaml_model(path: Path, root: type[M], see: str, overrides: Mapping[str, Any] | None = None) -> M:
    """A YAML file as a model.

    Args:
        path: the file.
        root: the model of the whole file.
        see: where to look for an example.
        overrides: dotted keys whose values replace the file's.

    Raises:
        ConfigError: the file is missing, empty or no YAML, a key is unknown, a value is missing or out of range.
    """
    data = _read_yaml(path, root, see)
    _override(data, overrides or {})
    try:
        return root.model_validate(data)
    except ValidationError as error:
        raise _explain(f"config {path.name}", error, root) from error


def _read_yaml(path: Path, root: type[BaseModel], see: str) -> dict[Any, Any]:
    owner = f"config {path.name}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "config", got=f"{path}: {error}", expected="a readable YAML file", repair="Check the path."
        ) from error
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(owner, got=f"invalid YAML ({error})", expected="valid YAML", repair="Correct it.") from error
    if not isinstance(data, dict):
        got = "an empty file" if data is None else f"a {type(data).__name__}"
        keys = ", ".join(root.model_fields)
        raise ConfigError(owner, got=got, expected=f"a mapping with the keys {keys}", repair=f"See {see}.")
    return data


def _override(data: dict[Any, Any], overrides: Mapping[str, Any]) -> None:
    """Set ``a.b`` to its value, making the mappings on the way."""
    for key, value in overrides.items():
        *parents, last = key.split(".")
        place = data
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    "--set", got=f"{key}, but {parent} is a value", expected="a key of the YAML", repair="See configs/."
                )
            place = inner
        place[last] = value


def _expanded(path: Path) -> Path:
    """`path` with ``~`` as the home directory; a name after it that is nobody's is a name."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExportConfig:
    """Read a YAML file; relative paths in it count from its own folder.

    Args:
        path: the file.
        overrides: dotted keys whose values replace the file's.

    Raises:
        ConfigError: the file is missing, empty or no YAML, a key is unknown, a value is missing or out of range.
    """
    path = Path(path)
    config = read_yaml_model(path, CONFIG, "configs/", overrides)
    checkpoint = config.checkpoint
    base = path.resolve().parent
    places = {"path": checkpoint.path, "cache_dir": checkpoint.cache_dir}
    absolute = {key: base / _expanded(value) for key, value in places.items() if value is not None}
    own = None if config.calibration is None else base / _expanded(config.calibration)
    return config.model_copy(update={"checkpoint": checkpoint.model_copy(update=absolute), "calibration": own})


def resolve(config: ExportConfig, spec: ModelSpec) -> ExportConfig:
    """Settle the lengths against the model: the result's `max_context_length` is a number.

    A prefill chunk longer than the whole context is shortened to it.

    Raises:
        ConfigError: `max_context_length` is above the model's `max_position_embeddings`.
    """
    limit = spec.max_position_embeddings
    length = limit if config.max_context_length is None else config.max_context_length
    if length > limit:
        raise ConfigError(
            "config",
            got=f"max_context_length = {length}",
            expected=f"at most {limit}, the model's max_position_embeddings",
            repair="Lower it, or leave it out to get the model's own.",
        )
    return config.model_copy(
        update={"max_context_length": length, "max_prefill_chunk": min(config.max_prefill_chunk, length)}
    )
