"""ExecuTorch's pass over memory layouts runs where it finds something to do.

`LegalizePortableDimOrderPass` re-traces every method once more, to copy what goes into five operators that want the
usual order of dimensions; a decoder has none of them outside its delegates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from exporter.tricks.base import LOWERING, patched, trick

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.fx.passes.infra.pass_base import PassResult


@trick(saves="5 of 121 CPU s of an export", made_for=LOWERING)
def needed_dim_order_pass() -> Iterator[None]:
    """The pass leaves a graph alone that has none of the operators that it looks for."""
    from executorch.exir.passes.legalize_portable_dim_order_pass import LegalizePortableDimOrderPass
    from torch.fx.passes.infra.pass_base import PassResult

    own = LegalizePortableDimOrderPass.call

    def call(self: LegalizePortableDimOrderPass, graph_module: GraphModule) -> PassResult:
        if not any(node.target in self._target_ops for node in graph_module.graph.nodes):
            return PassResult(graph_module, False)
        return own(self, graph_module)

    with patched(LegalizePortableDimOrderPass, "call", call):
        yield
