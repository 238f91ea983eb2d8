"""Prompts of about 6,000 tokens with the text that follows them, for measuring quality with forced tokens.

Sources: the installed Python's standard library, cut when the tool runs, and text written here. ``digest`` goes with a result.
"""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import sysconfig
from pathlib import Path

from oasis_sglang.bench.quality import Case
from oasis_sglang.prompts import PromptMaker

TOKENS = 6000
CONTINUATION = 64

FACTS = ("Note for the records: the maintenance password of the harbour crane is BLUE-HERON-4471.",
         "Note for the records: the survey team moved to the Lisbon office on 14 March 2019.",
         "Note for the records: the backup generator is in building seven, room 212.",
         "Note for the records: the annual budget of the Kestrel project is 3.8 million euros.")
NEEDLE_ANSWER = ("The maintenance password of the harbour crane is BLUE-HERON-4471. The backup generator is in building seven, room 212. "
                 "The survey team moved to the Lisbon office on 14 March 2019. The annual budget of the Kestrel project is 3.8 million euros.")
AGENT_ANSWER = ("I found the cause. The function wrap first splits the text into chunks and then fills one line after the other. When max_lines is "
                "reached, it takes chunks from the end of the current line until the placeholder fits, and appends the placeholder. If nothing is "
                "left on the line, it puts the placeholder after the previous line, which is the case that the test expects. I propose to handle "
                "an empty list of lines before that.")
CHAT_ANSWER = ("The two chapters treat errors differently. The first one describes the try statement: an except clause names the exceptions that it "
               "handles, and the finally clause runs whatever happens. The second one describes the with statement, which calls the methods "
               "__enter__ and __exit__ of a context manager, so that clean-up is part of the object and need not be written again.")
DOC_ANSWER = ("The module works with decimal numbers as people write them. A context holds the precision, the rounding and the traps for signals such "
              "as division by zero. An operation is computed exactly and then rounded to the precision of the context. Numbers keep trailing zeros, "
              "so that 1.30 plus 1.20 is 2.50.")


def _source(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text()


def _spread(maker: PromptMaker, text: str, tokens: int) -> str:
    paragraphs = [p for p in maker.decode(maker.encode(text)[:tokens]).split("\n\n") if p.strip()]
    step = len(paragraphs) / (len(FACTS) + 1)
    for i in reversed(range(len(FACTS))):
        paragraphs.insert(int((i + 1) * step), FACTS[i])
    return "\n\n".join(paragraphs)


def cases(maker: PromptMaker) -> list[Case]:
    topics = pydoc_data.topics.topics
    prose = "\n\n".join(topics[name] for name in ("objects", "execmodel", "naming", "types", "import", "class", "function", "exceptions"))
    return [
        Case("needle", *_asked(maker, "Read the following document carefully.\n\n" + _spread(maker, prose, 5700)
                               + "\n\nBased on the notes for the records in the document above: what is the maintenance password of the harbour crane, "
                               "where is the backup generator, who moved to the Lisbon office and when, and what is the annual budget of the Kestrel "
                               "project?", NEEDLE_ANSWER)),
        Case("agent", *_asked(maker, "You are a coding agent with the tools shell and read_file.\nThe test of textwrap fails: wrap() drops the placeholder "
                              'when max_lines is 1. Find the cause.\n\nread_file("textwrap.py")\n' + _cut(maker, _source("textwrap"), 4200)
                              + '\n\nread_file("shlex.py")\n' + _cut(maker, _source("shlex"), 1500)
                              + "\n\nExplain step by step what the function does with max_lines and the placeholder, and propose a fix.", AGENT_ANSWER)),
        Case("chat", *_asked(maker, "Here is a chapter.\n\n" + _cut(maker, topics["try"] + topics["raise"] + topics["exceptions"] + topics["assert"], 2900)
                             + "\n\nAnd another one.\n\n" + _cut(maker, topics["with"] + topics["context-managers"] + topics["specialnames"], 2900)
                             + "\n\nCompare how the two chapters treat errors and clean-up.", CHAT_ANSWER)),
        Case("docqa", *_asked(maker, "Here is a module.\n\n" + _cut(maker, _source("_pydecimal"), 5800)
                              + "\n\nExplain in your own words what this module does and what a context is.", DOC_ANSWER)),
        Case("code_heapq", *_continued(maker, _source("heapq") + _source("bisect"), 0)),
        Case("code_argparse", *_continued(maker, _source("argparse"), 4000)),
        Case("prose", *_continued(maker, prose, 9000)),
    ]


LONG_TEXTS = {"prose": ("import", "class", "with", "objects", "types"), "repeating": ("execmodel", "naming", "import", "class", "exceptions")}
"""``repeating``: after 2,000 tokens most of it stands word for word in the beginning."""


def long_case(maker: PromptMaker, tokens: int, text: str) -> Case:
    """``tokens`` of one of ``LONG_TEXTS`` after a prompt of 30."""
    ids = maker.encode("\n\n".join(pydoc_data.topics.topics[name] for name in LONG_TEXTS[text]))[: 30 + tokens]
    return Case(f"long_{text}", ids[:30], ids[30:])


def digest(chosen: list[Case]) -> str:
    return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]


def _cut(maker: PromptMaker, text: str, tokens: int) -> str:
    return maker.decode(maker.encode(text)[:tokens])


def _asked(maker: PromptMaker, question: str, answer: str) -> tuple[list[int], list[int]]:
    return maker.chat(question), maker.encode(answer)[:CONTINUATION]


def _continued(maker: PromptMaker, text: str, skip: int) -> tuple[list[int], list[int]]:
    ids = maker.encode(text)[skip : skip + TOKENS + CONTINUATION]
    return ids[:-CONTINUATION], ids[-CONTINUATION:]
