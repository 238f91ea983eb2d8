"""``python tools/chart_values.py``: writes the table of values into the chart's README, from the comments in its values.yaml.

A comment that begins with ``# --`` describes the key below it, with all that is in it; keys that follow without one of their own belong to
it as well. A key that has none and is the first is a section.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parents[1] / "deploy/helm/oasis"
BEGIN, END = "<!-- values: python tools/chart_values.py -->\n", "<!-- end -->\n"


@dataclass
class Row:
    """Keys (dotted paths) with their defaults, and the description that they share."""

    text: str
    keys: dict[str, object]


def rows(text: str) -> list[Row]:
    """Of a values.yaml. Raises ``ValueError`` for a value without a description."""
    found: list[Row] = []
    _walk(yaml.compose(text), yaml.safe_load(text), "", text.splitlines(), found)
    return found


def _walk(section: yaml.MappingNode, values: dict, prefix: str, lines: list[str], found: list[Row]) -> None:
    row = None
    for key, node in section.value:
        name, described = prefix + key.value, _above(lines, key.start_mark.line)
        if described:
            row = Row(described, {})
            found.append(row)
        elif isinstance(node, yaml.MappingNode) and node.value:
            row = None
            _walk(node, values[key.value], f"{name}.", lines, found)
            continue
        elif row is None:
            raise ValueError(f"{name} has no description")
        row.keys[name] = values[key.value]


def _above(lines: list[str], line: int) -> str:
    """The description that ends above ``line`` (from 0)."""
    words: list[str] = []
    while line and (comment := lines[line - 1].strip()).startswith("#"):
        line -= 1
        words.insert(0, comment.removeprefix("#").strip())
        if words[0].startswith("--"):
            return " ".join(words).removeprefix("--").strip()
    return ""


def table(text: str) -> str:
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for row in rows(text):
        first = next(iter(row.keys))
        names = [first, *("." + key.rpartition(".")[2] for key in list(row.keys)[1:])]
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(f'`{json.dumps(value)}`' for value in row.keys.values())} | {row.text} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """README.md as it should be."""
    head, _, rest = (CHART / "README.md").read_text().partition(BEGIN)
    return head + BEGIN + table((CHART / "values.yaml").read_text()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    (CHART / "README.md").write_text(page())
