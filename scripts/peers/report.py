"""The page that `make bench-peers` writes, from its JSON alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measuring import table
from peers.catalogue import MODELS, PEERS
from peers.schedule import SHORT, Figure, above_bare, at, key, long_peak, median, over_rounds, ratios_over_rounds

TITLES = {peer.name: peer.title for peer in PEERS}
Run = Mapping[str, Any]


def contenders(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Names of ours and of the peers that gave a result, in the order they ran."""
    ran = list(dict.fromkeys((run["ours"], run["name"]) for run in runs if run["result"]))
    return [name for ours, name in ran if ours], [name for ours, name in ran if not ours]


def lengths_of(runs: Sequence[Run]) -> list[int]:
    return sorted({int(length) for run in runs if run["result"] for length in run["result"]["decode"]})


def cell(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The rounds' median with their range; of fewer than three, which have no median to speak of, what there is."""
    if not values:
        return ""
    low, high = show(min(values)), show(max(values))
    if low == high:
        return low
    return f"{low}-{high}" if len(values) < 3 else f"{show(statistics.median(values))} ({low}-{high})"


def mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


def figures(lengths: Sequence[int]) -> list[tuple[str, Figure]]:
    """What is compared: a title and where to find it."""
    speeds = [(f"{kind} {length}", at(kind, length)) for kind in ("prefill", "decode") for length in lengths]
    sizes = [
        ("peak", above_bare),
        ("long peak", long_peak),
        ("load", key("load_seconds")),
        ("first token", key("first_token_seconds")),
    ]
    return [*speeds, *sizes, ("file", key("file_bytes"))]


def absolute(row: Mapping[str, Any]) -> str:
    runs = row["runs"]
    lengths = lengths_of(runs)
    columns = ["", *(name for name, _ in figures(lengths)), "NLL", "from fp32", "KL", "export CPU s", "export GB"]
    rows = []
    for name in (name for names in contenders(runs) for name in names):
        values = [over_rounds(runs, name, figure) for _, figure in figures(lengths)]
        shows: list[Callable[[float], str]] = [lambda v: f"{v:.0f}"] * (2 * len(lengths))
        shows += [mb, mb, lambda v: f"{v:.2f}", lambda v: f"{v:.2f}", mb]
        nll = median(runs, name, key("nll"))
        quality = [cell(nll, lambda v: f"{v:.4f}"), cell(nll, lambda v: f"{v - row['reference_nll']:+.4f}")]
        quality.append(cell(median(runs, name, key("kl")), lambda v: f"{v:.4f}"))
        cost = row.get("costs", {}).get(name, {})
        export = [
            cell(cost.get("cpu_seconds"), lambda v: f"{v:.0f}"),
            cell(cost.get("peak_bytes"), lambda v: f"{v / 1e9:.1f}"),
        ]
        rows.append([TITLES.get(name, name), *map(spread, values, shows), *quality, *export])
    return table(columns, rows)


def ratios(row: Mapping[str, Any]) -> str:
    runs = row["runs"]
    lengths = lengths_of(runs)
    ours, others = contenders(runs)
    rows = []
    for preset in ours:
        for peer in others:
            values = [ratios_over_rounds(runs, preset, peer, figure) for _, figure in figures(lengths)]
            rows.append([preset, TITLES[peer], *(spread(found, lambda v: f"{v:.2f}") for found in values)])
    return table(["ours", "over", *(name for name, _ in figures(lengths))], rows)


def limits(row: Mapping[str, Any]) -> str:
    """How near decoding comes to reading weights and live cache once a token."""
    runs = [run for run in row["runs"] if run["ours"]]
    rows = []
    for name in contenders(runs)[0]:
        for length in lengths_of(runs):
            decode, limit, live = (median(runs, name, at(k, length)) for k in ("decode", "limits", "live_bytes"))
            if decode is not None and limit is not None and live is not None:
                rows.append([name, str(length), f"{live / 1e6:.1f}", f"{limit:.0f}", f"{decode / limit:.0%}"])
    return table(("ours", "tokens", "live cache MB", "limit tok/s", "reached"), rows)


def troubles(row: Mapping[str, Any]) -> str:
    lines = [f"- {TITLES.get(name, name)}: {reason}" for name, reason in row["missing"].items()]
    failed = {(run["name"], run["error"]) for run in row["runs"] if run.get("error")}
    lines += [f"- {TITLES.get(name, name)} failed: {error}" for name, error in sorted(failed)]
    return "\n".join(["", "Missing:", "", *lines, ""]) if lines else ""


def versions(results: Mapping[str, Any]) -> str:
    found: dict[str, dict[str, str]] = {}
    for row in results["models"].values():
        for run in row["runs"]:
            if run["result"]:
                name = "ours" if run["ours"] else TITLES[run["name"]]
                found.setdefault(name, {}).update(run["result"]["versions"])
    return "\n".join(f"- {name}: {', '.join(f'{k} {v}' for k, v in own.items())}" for name, own in found.items())


def counted(rounds: int) -> str:
    """What a figure of that many rounds is."""
    if rounds == 1:
        return "One round: no medians and no ranges"
    if rounds == 2:
        return "Two rounds: both figures, no medians"
    return f"Medians of {rounds} rounds, their range in brackets"


def section(model: str, row: Mapping[str, Any]) -> str:
    rates = [run["result"]["bandwidth"] / 1e9 for run in row["runs"] if run["ours"] and run["result"]]
    measured = f"{min(rates):.1f} to {max(rates):.1f} GB/s" if rates else "not measured"
    rounds = 1 + max((run["round"] for run in row["runs"]), default=0)
    return f"""## {MODELS[model]}

{counted(rounds)}. fp32 NLL {row["reference_nll"]:.4f}; prefill and decode: tokens a second; peak: MB above the
bare process after conversations of up to {SHORT} tokens, long peak: after the longest one; load and first
token: seconds; file: MB.

{absolute(row)}

Ours over the peer in the same round (speeds: more is better; peak, load, first token, file: less is):

{ratios(row)}

Decoding against the memory: bytes a token must read (weights once, live cache once) over the bandwidth measured in the
same processes, {measured}.

{limits(row)}
{troubles(row)}"""


def markdown(results: Mapping[str, Any]) -> str:
    """The committed page."""
    sections = "\n".join(section(model, row) for model, row in results["models"].items() if row.get("runs"))
    return f"""# Against what a user would pick instead

{results["date"]}, {results["machine"]}; {results["threads"]} compute threads each. Reproduce with `make peers` (once:
every peer into an environment of its own, the models converted) and `make bench-peers`; the raw figures are in
`peers.json`. Absolute figures do not carry to another machine; the ratios are the point.

Ours and a peer ran by turns, each measurement in a process of its own. All start from the same weights: the model's
4-bit GGUF, which llama.cpp runs as it is and the others dequantised to float32 and quantised again; a peer at 4 bits
loses likelihood by that which it would not lose on the original weights. prefill N: N tokens over the seconds from an
empty cache to the first greedy token, the median of 3 fillings of one process. decode N: greedy tokens after a context
of N, by the median of 32. NLL: mean over 1,000 true tokens of English after 512, each run alone, against Transformers
in float32; KL: mean divergence in nats of the next token's distribution there from Transformers'. Contexts above
{SHORT} tokens are measured in the first round alone and filled once. first token: loading and a prompt of 128 tokens in
a fresh process with imports done and the files in the system's cache. export: what making the bundle or converting the
model took, CPU seconds of all its processes and the largest one's peak of memory.

{sections}
## Versions

{versions(results)}
"""
