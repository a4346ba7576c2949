"""Two eager callables behind the `Program` interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, no_grad

from runtime_ref.programs import check_call

Method = Callable[..., Tensor]


class EagerProgram:
    """Runs two callables ``(input_ids, position_ids, *states) -> logits [1, vocab]`` that write the states in place."""

    def __init__(self, *, prefill: Method, main: Method) -> None:
        self._methods = {"prefill": prefill, "main": main}

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """See `Program.run`."""
        check_call(method, input_ids, position_ids)
        with no_grad():
            return self._methods[method](input_ids, position_ids, *states)
