"""The memory plan as a picture: bytes of state over the context length, both axes logarithmic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from exporter.errors import ConfigError
from exporter.outputs import cannot_write, check_output, written
from exporter.plan import LayerState, plan_context
from exporter.spec import KINDS
from exporter.units import BINARY, size

WIDTH, HEIGHT = 1080, 660  # pixels
_DPI = 120
_FIRST = 64  # tokens at the left edge, or fewer
_STYLES = (("tab:green", "--"), ("tab:blue", ":"), ("tab:gray", "-."), ("tab:purple", "--"), ("tab:brown", ":"))
"""Of the lines of single kinds, those that grow first."""


def check_plot_path(path: Path) -> None:
    """Refuse a path that would fail only after the work.

    Raises:
        ConfigError: not a ``.png``, or nothing that can be written.
    """
    if path.suffix.lower() != ".png":
        raise _error(path.name, "a file name that ends in .png", "Write e.g. plan.png.")
    check_output("--plot", path)


def write_plot(path: Path, title: str, states: Sequence[LayerState], contexts: Sequence[int]) -> None:
    """Draw the plan up to the longest of `contexts` (each of them marked): beside `path`, then renamed.

    Raises:
        ConfigError: the file cannot be written; an older one at `path` is then still there.
    """
    check_plot_path(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    last = max(contexts)
    corners = {full for state in states if (full := state.fills_at) is not None}
    doubling = {1 << n for n in range(last.bit_length())}
    tokens = sorted({n for n in doubling | corners if min(_FIRST, last // 16) <= n < last} | set(contexts))
    plans = [plan_context(states, n) for n in tokens]
    bounded = [state for state in states if state.fills_at is not None]
    lines = [
        ("all layers, full caches", [p.full for p in plans], "tab:red", "-", 2.5),
        ("sliding layers, full caches", [plan_context(bounded, n).full for n in tokens], "tab:red", ":", 1.5),
        ("all layers, rings + global", [p.total for p in plans], "tab:blue", "-", 2.5),
    ]
    kinds = sorted(KINDS.values(), key=lambda kind: not kind.grows)
    for kind, (colour, style) in zip(kinds, itertools.cycle(_STYLES), strict=False):
        lines.append((kind.line, [p.kinds[kind.label] for p in plans], colour, style, 1.5))
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    marked = [tokens.index(n) for n in sorted(set(contexts))]
    for label, values, colour, style, width in lines:
        if any(values):
            text = f"{label}: {size(values[-1], BINARY)}"
            axes.plot(
                tokens,
                values,
                color=colour,
                linestyle=style,
                linewidth=width,
                label=text,
                marker="o",
                markevery=marked,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value, BINARY, digits=0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length in tokens")
    axes.set_ylabel("bytes of state (1 GiB = $2^{30}$)")
    axes.set_title(title.replace("$", r"\$"))  # a name is not a formula
    axes.grid(alpha=0.3)
    axes.legend(title=f"at {last:,} tokens")
    try:
        with written(path) as partial:
            figure.savefig(partial, format="png")
    except OSError as error:
        raise cannot_write("--plot", path, error) from error


def _error(got: str, expected: str, repair: str) -> ConfigError:
    return ConfigError("--plot", got=got, expected=expected, repair=repair)
