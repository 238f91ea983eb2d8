"""Documents taken apart: links, anchors, footnotes, and the commands of their console blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PROMPT = re.compile(r"^\w*\$ +")
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
OPERATORS = {";", "&&", "||", "|", "&", "(", ")"}


@dataclass(frozen=True)
class Command:
    """One program with its words, as a shell would start it. ``line``: where in its document the console line begins."""

    words: tuple[str, ...]
    line: int

    @property
    def program(self) -> str:
        return self.words[0].removeprefix("./")


# -- prose ----------------------------------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """Without what is code: nothing in there is a link."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Fragments that lead somewhere in a document, as GitHub makes them: of headings, and those written as ``<a id>``."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found | set(re.findall(r'<a id="([^"]+)"', text))


def dead_links(path: Path, text: str) -> list[str]:
    """Links of the document at ``path`` to a file that is not there, or to a part of one that it does not have; those to other sites are not
    followed."""
    found = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = unquote(target).partition("#")
        there = path if not file else (path.parent / file).resolve()
        if file and not there.exists():
            found.append(f"{target}: no such file")
        elif fragment and fragment not in anchors(text if there == path else there.read_text()):
            found.append(f"{target}: no such part")
    return found


def loose_footnotes(text: str) -> set[str]:
    """Footnotes that are referred to and missing, or there and never referred to."""
    defined = re.findall(r"^\[\^([^\]]+)\]:", text, re.M)
    used = re.findall(r"\[\^([^\]]+)\](?!:)", text)
    return set(defined) ^ set(used)


# -- console blocks -------------------------------------------------------------------------------------------------------


def console_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what is typed: after a prompt, with what belongs to it of the next lines, without comments."""
    for block in FENCE.finditer(text):
        first = text[:block.start(2)].count("\n") + 1
        lines = block[2].splitlines()
        at = 0
        while at < len(lines):
            begin, typed = at, lines[at]
            at += 1
            if not PROMPT.match(typed):
                continue
            typed = PROMPT.sub("", typed)
            while (shown := uncommented(typed)) is None or shown.endswith("\\"):
                if at == len(lines):
                    raise ValueError(f"line {first + begin}: it does not end within its block: {typed}")
                typed = f"{typed}\n{lines[at]}" if shown is None else f"{shown[:-1]} {lines[at].lstrip()}"
                at += 1
            yield first + begin, shown


def uncommented(typed: str) -> str | None:
    """Up to its comment; None: a quotation is open."""
    quote = ""
    for at, char in enumerate(typed):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or typed[at - 1].isspace()):
            return typed[:at].rstrip()
    return None if quote else typed.rstrip()


def commands(text: str) -> Iterator[Command]:
    """Every program that the document's console blocks start, those within ``$(...)`` too; what they print becomes the word ``PRINTED``."""
    for line, typed in console_lines(text):
        for inner in re.findall(r"\$\(([^()]*)\)", typed):
            yield from _split(inner, line)
        yield from _split(re.sub(r"\$\([^()]*\)", "PRINTED", typed), line)


def _split(typed: str, line: int) -> Iterator[Command]:
    lexer = shlex.shlex(typed, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in OPERATORS:
            words.append(word)
            continue
        while words and (words[0] in ("do", "then", "sudo") or re.fullmatch(r"[A-Z_]+=.*", words[0])):
            words.pop(0)
        if words and words[0] not in ("for", "done", "cd"):
            yield Command(tuple(word for word in words if word != "..."), line)
        words = []
