"""Write docs/results.md from the JSON files of docs/results; nothing is measured. Run by ``make results``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from sections import apple_models, export_scaling, peers, quality, real_models
from sections.common import Run

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECTIONS: dict[str, Callable[[Sequence[Run]], str]] = {
    "quality": quality.section,
    "peers": peers.section,
    "real-models": real_models.section,
    "apple-models": apple_models.section,
    "export-scaling": export_scaling.section,
}
"""JSON file -> what it becomes, in the order of the page."""


def contents(sections: Sequence[str]) -> str:
    """A link to each section."""
    titles = [section.splitlines()[0].removeprefix("## ") for section in sections]
    anchors = ["".join(c for c in title.lower() if c.isalnum() or c in " -").replace(" ", "-") for title in titles]
    return "\n".join(f"- [{title}](#{anchor})" for title, anchor in zip(titles, anchors, strict=True))


def page(folder: Path) -> str:
    """The page, from the files of `folder`."""
    sections = [
        section(json.loads((folder / f"{name}.json").read_text())["runs"]) for name, section in SECTIONS.items()
    ]
    return f"""# Results

Generated from [results/](results/) by `make results`: do not edit. Nothing here was run on a phone. Each section says
where and when it was measured and how to measure it again. A bench replaces the figures of the machine it runs on;
those of another machine stand beside them.

{contents(sections)}

{chr(10).join(sections)}"""


def main(folder: Path = DOCS / "results", out: Path = DOCS / "results.md") -> None:
    """Write the page."""
    out.write_text(page(folder))
    print(out)


if __name__ == "__main__":
    typer.run(main)
