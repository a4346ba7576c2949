"""The page that `make bench-peers` writes, from its JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measuring import table
from peers.catalogue import MODELS, PEERS
from peers.schedule import SHORT, Figure, above_bare, at, key, long_peak, median, ratio, resident

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


def mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


def figures(runs: Sequence[Run]) -> list[tuple[str, Figure, Callable[[float], str]]]:
    """What is compared, where any of `runs` has it: a title, where to find it and how an absolute one is written."""

    def whole(value: float) -> str:
        return f"{value:.0f}"

    def seconds(value: float) -> str:
        return f"{value:.2f}"

    lengths = lengths_of(runs)
    speeds = [(f"{kind} {length}", at(kind, length), whole) for kind in ("prefill", "decode") for length in lengths]
    sizes = [
        ("peak", above_bare, mb),
        ("anonymous", resident("anonymous"), mb),
        ("file pages", resident("file"), mb),
        ("long peak", long_peak, mb),
        ("load", key("load_seconds"), seconds),
        ("first token", key("first_token_seconds"), seconds),
        ("file", key("file_bytes"), mb),
    ]
    results = [run["result"] for run in runs if run["result"]]
    return [one for one in (*speeds, *sizes) if any(one[1](result) is not None for result in results)]


def absolute(row: Mapping[str, Any]) -> str:
    runs = row["runs"]
    compared = figures(runs)
    columns = ["", *(name for name, *_ in compared), "NLL", "from fp32", "KL", "export CPU s", "export GB"]
    rows = []
    for name in (name for names in contenders(runs) for name in names):
        values = [cell(median(runs, name, figure), show) for _, figure, show in compared]
        nll = median(runs, name, key("nll"))
        quality = [cell(nll, lambda v: f"{v:.4f}"), cell(nll, lambda v: f"{v - row['reference_nll']:+.4f}")]
        quality.append(cell(median(runs, name, key("kl")), lambda v: f"{v:.4f}"))
        cost = row.get("costs", {}).get(name, {})
        export = [
            cell(cost.get("cpu_seconds"), lambda v: f"{v:.0f}"),
            cell(cost.get("peak_bytes"), lambda v: f"{v / 1e9:.1f}"),
        ]
        rows.append([TITLES.get(name, name), *values, *quality, *export])
    return table(columns, rows)


def ratios(row: Mapping[str, Any]) -> str:
    runs = row["runs"]
    compared = [one for one in figures(runs) if one[0] != "file pages"]  # which may be none at all
    ours, others = contenders(runs)
    rows = []
    for preset in ours:
        for peer in others:
            values = [ratio(runs, preset, peer, figure) for _, figure, _ in compared]
            rows.append([preset, TITLES[peer], *(cell(value, lambda v: f"{v:.2f}") for value in values)])
    return table(["ours", "over", *(name for name, *_ in compared)], rows)


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


def section(model: str, row: Mapping[str, Any]) -> str:
    rates = [run["result"]["bandwidth"] / 1e9 for run in row["runs"] if run["ours"] and run["result"]]
    measured = f"{min(rates):.1f} to {max(rates):.1f} GB/s" if rates else "not measured"
    rounds = 1 + max((run["round"] for run in row["runs"]), default=0)
    return f"""## {MODELS[model]}

Medians of {rounds} rounds; fp32 NLL {row["reference_nll"]:.4f}. prefill and decode: tokens a second; peak: MB above the
bare process after conversations of up to {SHORT} tokens, long peak: after the longest one; anonymous and file pages: MB
above it that are resident after those of up to {SHORT} tokens; load and first token: seconds; file: MB.

{absolute(row)}

Ours over the peer, the median of each round's ratio (speeds: more is better; all else: less is):

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
empty cache to the first greedy token, the median of 3. decode N: greedy tokens after a context of N, by the median of
32. NLL: mean over 1,000 true tokens of English after 512, each run alone, against Transformers in float32; KL: mean
divergence in nats of the next token's distribution there from Transformers'. Contexts above {SHORT} tokens are measured
in the first round alone. first token: loading and a prompt of 128 tokens in a fresh process with imports done and the
files in the system's cache. export: what making the bundle or converting the model took, CPU seconds of all its
processes and the largest one's peak of memory. Memory is counted both ways: the peak has everything that was resident,
and apart from it anonymous is what a process wrote, which the system cannot drop, and file pages are those of mapped
files, which it can; ExecuTorch's Python binding locks those of a program where it may.{results.get("note", "")}

{sections}
## Versions

{versions(results)}
"""
