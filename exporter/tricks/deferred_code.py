"""Graph modules write their code when they are called.

A graph module writes its Python code anew, and compiles it, whenever something says that its graph has changed: some
thousand times while a decoder is lowered, most of them for the whole of a method. Passes interpret graphs and call no
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from exporter.tricks.base import LOWERING, patched, trick

if TYPE_CHECKING:
    from torch.fx import GraphModule


@trick(saves="11 of 127 CPU s of an export", made_for=LOWERING)
def deferred_code() -> Iterator[None]:
    """Graph modules that are made or changed in here write their code when they are called, then or later."""
    from torch.fx import GraphModule

    with (
        patched(GraphModule, "recompile", deferring(GraphModule.recompile)),
        patched(GraphModule, "__str__", object.__repr__),  # messages to a log print modules, code and all
    ):
        yield


def deferring(compile_now: Callable[[GraphModule], Any]) -> Callable[[GraphModule], None]:
    """What stands for `GraphModule.recompile`, which nobody in a lowering asks for the code that it returns."""
    from torch.fx.graph import _PyTreeCodeGen

    def recompile(module: GraphModule) -> None:
        codegen = module.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec

        def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
            compile_now(self)
            return self.forward(*args, **kwargs)

        type(module).forward = forward  # every graph module is of a class of its own

    return recompile
