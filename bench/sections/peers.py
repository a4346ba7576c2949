"""The section of docs/results.md that `bench/bench_peers.py` measures: our bundles and the peers, by turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers.catalogue import MODELS, PEERS
from peers.schedule import SHORT, Figure, above_bare, at, by_round, key, long_peak, median, ratio, resident
from sections.common import Run, cell, mb, provenance, side_by_side

TITLES = {peer.name: peer.title for peer in PEERS}
FOR_A_RANGE = 3
"""Fewer values than this have no range."""
Show = Callable[[float], str]


def contenders(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Names of ours and of the peers that gave a result, in the order they ran."""
    ran = list(dict.fromkeys((run["ours"], run["name"]) for run in runs if run["result"]))
    return [name for ours, name in ran if ours], [name for ours, name in ran if not ours]


def named(name: str) -> str:
    """A peer by its title; ours is in bold."""
    return TITLES.get(name, f"**{name}**")


def speeds(lengths: Sequence[int]) -> list[tuple[str, Figure]]:
    return [(f"{kind} {length}", at(kind, length)) for kind in ("prefill", "decode") for length in lengths]


def whole(value: float) -> str:
    return f"{value:.0f}"


def hundredths(value: float) -> str:
    return f"{value:.2f}"


SIZES: list[tuple[str, Figure, Show]] = [
    ("peak MB", above_bare, mb),
    ("anonymous MB", resident("anonymous"), mb),
    ("file pages MB", resident("file"), mb),
    ("long peak MB", long_peak, mb),
    ("load s", key("load_seconds"), hundredths),
    ("first token s", key("first_token_seconds"), hundredths),
    ("file MB", key("file_bytes"), mb),
]
COMPARED = ("peak MB", "anonymous MB", "first token s")
"""Of `SIZES`, what ratios are given of."""


def ranged(runs: Sequence[Run], name: str, figure: Figure, show: Show) -> str:
    """The median over the rounds, with the range behind it where there are enough."""
    middle, found = median(runs, name, figure), by_round(runs, name, figure).values()
    text = cell(middle, show)
    return f"{text} ({show(min(found))} to {show(max(found))})" if len(found) >= FOR_A_RANGE else text


class Model:
    """One model over all machines."""

    def __init__(self, runs: Sequence[Run], model: str) -> None:
        self.runs = [run for run in runs if run["models"].get(model, {}).get("runs")]
        self.model = model
        results = [one["result"] for run in self.runs for one in self.row(run)["runs"] if one["result"]]
        self.lengths = sorted({int(length) for result in results for length in result["decode"]})
        self.sizes = [size for size in SIZES if any(size[1](result) is not None for result in results)]

    def row(self, run: Run) -> Run:
        row: Run = run["models"][self.model]
        return row

    def speed(self, run: Run) -> list[list[str]]:
        own = self.row(run)["runs"]
        names = (name for names in contenders(own) for name in names)
        return [
            [named(name), *(ranged(own, name, figure, whole) for _, figure in speeds(self.lengths))] for name in names
        ]

    def rest(self, run: Run) -> list[list[str]]:
        row = self.row(run)
        own, rows = row["runs"], []
        for name in (name for names in contenders(own) for name in names):
            nll, cost = median(own, name, key("nll")), row.get("costs", {}).get(name, {})
            rows.append(
                [
                    named(name), *(ranged(own, name, figure, show) for _, figure, show in self.sizes),
                    "" if nll is None else f"{nll - row['reference_nll']:+.4f}",
                    cell(median(own, name, key("kl")), ".4f"),
                    cell(cost.get("cpu_seconds"), ".0f"), cell(cost.get("peak_bytes"), lambda v: f"{v / 1e9:.1f}"),
                ]
            )  # fmt: skip
        return rows

    def figures(self) -> list[tuple[str, Figure]]:
        """What ratios are given of."""
        return [*speeds(self.lengths), *((name, figure) for name, figure, _ in self.sizes if name in COMPARED)]

    def ratios(self, run: Run) -> list[list[str]]:
        own = self.row(run)["runs"]
        ours, others = contenders(own)
        return [
            [named(name), TITLES[peer], *(cell(ratio(own, name, peer, figure), ".2f") for _, figure in self.figures())]
            for name in ours
            for peer in others
        ]

    def limits(self, run: Run) -> list[list[str]]:
        """How near decoding comes to reading weights and live cache once a token."""
        own = [one for one in self.row(run)["runs"] if one["ours"]]
        rows = []
        for name in contenders(own)[0]:
            for length in self.lengths:
                decode, limit, live = (median(own, name, at(k, length)) for k in ("decode", "limits", "live_bytes"))
                if decode is not None and limit is not None and live is not None:
                    reached = f"{decode / limit:.0%}"
                    rows.append([named(name), f"{length:,}", f"{live / 1e6:.1f}", whole(limit), reached])
        return rows

    def rounds(self) -> str:
        """What a figure is."""
        found = [len({one["round"] for one in self.row(run)["runs"] if one["result"]}) for run in self.runs]
        counts = {
            1: "One run of each peer, so there are no ranges. Ours ran before every peer: where that makes several "
            "processes, its figure is their median.",
            2: "Two rounds: a figure is the mean of both, without a range.",
        }
        many = f"Medians of {min(found)} rounds, the range behind them; a figure without a range was measured once."
        return counts.get(min(found), many)

    def bandwidth(self) -> str:
        own = [one["result"] for run in self.runs for one in self.row(run)["runs"] if one["ours"] and one["result"]]
        rates = [result["bandwidth"] / 1e9 for result in own]
        return f"{min(rates):.0f} to {max(rates):.0f} GB/s" if rates else "not measured"

    def weights(self) -> str:
        found: dict[str, str] = {}
        for run in self.runs:
            for one in self.row(run)["runs"]:
                if one["ours"] and one["result"]:
                    found.setdefault(one["name"], one["result"].get("weights", ""))
        return "\n".join(f"- {named(name)}: {weights}" for name, weights in found.items() if weights)

    def troubles(self) -> str:
        lines: list[str] = []
        for run in self.runs:
            row = self.row(run)
            lines += [f"- {named(name)} is missing: {reason}" for name, reason in row["missing"].items()]
            failed = {(one["name"], one["error"]) for one in row["runs"] if one.get("error")}
            lines += [f"- {named(name)} failed: {error}" for name, error in sorted(failed)]
        return "\n".join(lines)

    def section(self) -> str:
        nll = self.row(self.runs[0])["reference_nll"]
        sizes = [name for name, *_ in self.sizes]
        notes = "\n".join(filter(None, (self.weights(), self.troubles())))
        return f"""### {MODELS[self.model]}

{self.rounds()}

{notes}

Tokens a second:

{side_by_side(self.runs, 1, ("", *(name for name, _ in speeds(self.lengths))), self.speed)}

Memory, time to start, quality and cost of making the file; float32 has an NLL of {nll:.4f}:

{side_by_side(self.runs, 1, ("", *sizes, "NLL from float32", "KL", "export CPU s", "export GB"), self.rest)}

Ours over the peer (for speeds, more is better; for the rest, less):

{side_by_side(self.runs, 2, ("ours", "over", *(name for name, _ in self.figures())), self.ratios)}

Decoding against memory bandwidth. A token must read every weight and the live cache once; `limit` is that many bytes at
the bandwidth measured in the same processes ({self.bandwidth()}):

{side_by_side(self.runs, 2, ("ours", "tokens", "live cache MB", "limit tokens/s", "reached"), self.limits)}
"""


def versions(runs: Sequence[Run]) -> str:
    found: dict[str, dict[str, str]] = {}
    for run in runs:
        for row in run["models"].values():
            for one in row.get("runs", ()):
                if one["result"]:
                    name = "ours" if one["ours"] else TITLES[one["name"]]
                    found.setdefault(name, {}).update(one["result"]["versions"])
    return "\n".join(f"- {name}: {', '.join(f'{k} {v}' for k, v in own.items())}" for name, own in found.items())


def section(runs: Sequence[Run]) -> str:
    models = [model for model in MODELS if any(run["models"].get(model, {}).get("runs") for run in runs)]
    threads = " and ".join(map(str, sorted({run["threads"] for run in runs})))
    return f"""## Against other runtimes

{provenance(runs)}

Reproduce: `make peers` (once: installs the peers and converts the models), then `make bench-peers`. Compute threads:
{threads}.

Ours and a peer run by turns, each measurement in a process of its own. All start from the same weights, the model's
4-bit GGUF: llama.cpp runs it as it is, the others quantise its dequantised weights again. So a peer with 4 bits loses
likelihood that it would not lose from the original checkpoint. Use the ratios: tokens a second are those of this
machine.

- `prefill N`: N tokens over the seconds from an empty cache to the first greedy token. `decode N`: greedy tokens a
  second after a context of N. Contexts above {SHORT:,} are measured once.
- `peak MB`: the largest resident set after conversations of up to {SHORT:,} tokens, less that of the bare process
  (interpreter and imports); `long peak MB`: after the longest one. **What a peak counts differs**: whoever maps a file
  has the pages it touched in its peak, although the system could take them back. (ExecuTorch's Python binding locks
  what it reads of a program; an app maps it without locking.) So, where they were measured: `anonymous MB`, what the
  process wrote, and `file pages MB`, what it mapped, after conversations of up to {SHORT:,} tokens.
- `first token s`: loading and a prompt of 128 tokens in a fresh process, imports done, the file in the system's cache.
- NLL and KL divergence: against Transformers in float32, over 1,000 tokens of English after 512, one token a call.
- `export`: CPU seconds of making the bundle or converting the model, and the peak memory of its largest process.

{"".join(Model(runs, model).section() + chr(10) for model in models)}### Versions

{versions(runs)}
"""
