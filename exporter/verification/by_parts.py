"""Transformers' own forward over one layer's or one table's weights at a time.

Letters: n compared positions, V vocab_size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from exporter.checkpoint import Checkpoint, GGUFCheckpoint
from exporter.spec import Comparison
from exporter.verification.compare import TRANSFORMERS, Differences
from exporter.verification.runs import Calls, Run
from exporter.verification.transformers import NoReference, transformers_config

Read = Callable[[], torch.Tensor]
MOST_TOKENS = 1024
"""Of the text that the float model read, so much goes through Transformers' forward, whose attention is all there at
once."""


def compare_model_with_transformers(checkpoint: Checkpoint, original: Run, calls: Calls) -> tuple[Comparison, Calls]:
    """The float model against Transformers, at the last token of the first calls, which are returned too.

    Raises:
        NoReference: Transformers cannot say what the model should.
    """
    few = calls.within(MOST_TOKENS)
    positions = [end - 1 for _, end in few.spans()]
    rows = TransformersByParts(checkpoint).logits(few.ids, positions)
    differences = Differences(TRANSFORMERS, None)
    for got, want in zip(original.logits, rows, strict=False):
        differences.add(got, want)
    return differences.comparison(), few


class Loading(Protocol):
    """How Transformers gets its parameters out of the stored tensors of one kind of checkpoint."""

    def targets(self, keys: Iterable[str]) -> dict[str, str]:
        """The parameter that a stored tensor is, or is a part of; those that are none of the model's are left out."""

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Give the model what `tensors` hold, by stored name; all that make up a parameter come at once."""


class TransformersByParts:
    """A causal language model of Transformers without weights, whose every part has its own while it is at work."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises NoReference: Transformers does not know the model, or reads it otherwise than from these tensors."""
        config = transformers_config(checkpoint)
        import transformers
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

        with no_init_weights(), init_empty_weights(include_buffers=False):
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self._loading: Loading = (
            _FromGGUF(self.model, checkpoint)
            if isinstance(checkpoint, GGUFCheckpoint)
            else _FromSafetensors(self.model)
        )
        stored = checkpoint.raw_tensors()
        self._stored: dict[str, dict[str, Read]] = {}
        for key, target in self._loading.targets(stored).items():
            self._stored.setdefault(target, {})[key] = stored[key]
        for name, part in _parts(self.model):
            names = [f"{name}.{own}" if name else own for own, _ in part.named_parameters(remove_duplicate=False)]
            part.register_forward_pre_hook(self._before(names))
            part.register_forward_hook(self._after(names))

    @torch.no_grad()
    def logits(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """float32 ``[n, V]`` at `positions` of one forward over `ids`.

        Raises:
            NoReference: a parameter that takes part is not in the files.
        """
        out = self.model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=torch.tensor(list(positions)))
        return out.logits[0].float()

    def _before(self, names: list[str]) -> Callable[..., None]:
        def give(*_: object) -> None:
            tied: dict[str, str] = self.model.all_tied_weights_keys
            sources = {name: tied.get(name, name) for name in names}
            keys = {key: read for source in set(sources.values()) for key, read in self._stored.get(source, {}).items()}
            self._loading.load({key: read() for key, read in keys.items()})
            for name, source in sources.items():
                if name != source:  # a tied table is read again wherever it is used
                    set_parameter(self.model, name, self.model.get_parameter(source))
                    set_parameter(self.model, source, self._empty(source))
            if missing := [name for name in names if self.model.get_parameter(name).is_meta]:
                raise NoReference(f"{len(missing)} of its parameters are not in the files, such as {missing[0]}")

        return give

    def _after(self, names: list[str]) -> Callable[..., None]:
        def take(*_: object) -> None:
            for name in names:
                set_parameter(self.model, name, self._empty(name))

        return take

    def _empty(self, name: str) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.model.get_parameter(name).to("meta"), requires_grad=False)


def set_parameter(model: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, parameter)


def _parts(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The submodules that get their weights together: the elements of lists, and elsewhere what has parameters of its
    own."""
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        whole = isinstance(module, torch.nn.ModuleList) or next(child.parameters(recurse=False), None) is not None
        if whole:
            yield name, child
        else:
            yield from _parts(child, f"{name}.")


class _FromSafetensors:
    """By the transforms that Transformers' loader has for the model: prefixes, fused and stacked matrices."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._model: Any = model
        self._transforms: list[Any] = get_model_conversion_mapping(model)

    def targets(self, keys: Iterable[str]) -> dict[str, str]:
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        transforms = copy.deepcopy(self._transforms)  # they remember what they matched
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        names, found = self._model.state_dict(), {}
        for key in sorted(keys, key=dot_natural_key):  # as the loader goes through them
            for attempt in (([], []), (renamings, converters)):
                name, _ = rename_source_key(key, *attempt, self._model.base_model_prefix, names)
                if name in names:
                    found[key] = str(name)
        return found

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=copy.deepcopy(self._transforms))
        convert_and_load_state_dict_in_model(self._model, dict(tensors), config)


class _FromGGUF:
    """By Transformers' table of GGUF names and what it does to the tensors of an architecture."""

    def __init__(self, model: Any, checkpoint: GGUFCheckpoint) -> None:
        from transformers import modeling_gguf_pytorch_utils as gguf

        architecture = str(checkpoint.metadata["general.architecture"])
        kind = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)
        self._model, self._processor = model, kind(config=model.config.to_dict())
        # Not the submodules by themselves, of which it makes a table each, a tenth of a second every one.
        top = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=list)
        try:
            self._names: dict[str, str] = gguf.get_gguf_hf_weights_map(top, self._processor)
        except NotImplementedError as error:
            raise NoReference(" ".join(str(error).split())) from error

    def targets(self, keys: Iterable[str]) -> dict[str, str]:
        found = {key: self._names.get(key, self._names.get(key.removesuffix(".weight"))) for key in keys}
        return {key: name for key, name in found.items() if name is not None}  # experts are listed without the suffix

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        made: dict[str, torch.Tensor] = {}
        several = {"tensors": made}  # what a parameter is made of more than one tensor goes in here
        for key, tensor in tensors.items():
            weights, name, _ = self._processor.process(
                weights=tensor.numpy(), name=key, tensor_key_mapping=self._names, parsed_parameters=several
            )
            if name in self._names:
                made[self._names[name]] = torch.from_numpy(np.ascontiguousarray(weights))
        for name, value in made.items():
            set_parameter(self._model, name, torch.nn.Parameter(value, requires_grad=False))
