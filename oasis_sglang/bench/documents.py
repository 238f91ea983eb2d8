"""Questions about real documents, code that goes on, and long answers. Texts are cut from the Python that runs this; questions and
answers are ours."""

from __future__ import annotations

import inspect
import pydoc_data.topics
import random
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from oasis_sglang.bench.jobs import Job, Wanted, Work
from oasis_sglang.prompts import PromptMaker

_CONTINUATION = 64
_CHARACTERS_PER_TOKEN = 12
"""More than any text here has."""


class Document(NamedTuple):
    """``source``: a module, or names of documentation topics."""

    source: str
    questions: tuple[tuple[str, str], ...]


DOCUMENTS = (
    Document("_pydecimal", (
        ("Explain in your own words what this module does and what a context is.",
         "The module works with decimal numbers as people write them. A context holds the precision, the rounding and the traps for signals such as "
         "division by zero. An operation is computed exactly and then rounded to the precision of the context."),
        ("Which rounding modes does the module know, and what does half even mean?",
         "It rounds up, down, to the ceiling or the floor, and to the nearest with ties going up, down or to the even digit. Half even sends a tie to "
         "the neighbour whose last digit is even, so that errors do not add up in one direction."),
        ("What happens when a number is divided by zero?",
         "The context has a trap for division by zero. If the trap is set, an exception is raised. If it is not, the result is infinity with the right "
         "sign and a flag of the context remembers that it happened."),
        ("How are special values such as infinity and NaN represented?",
         "A decimal number has a sign, a string of digits and an exponent. For special values the exponent is a letter: F for infinity, n for a quiet "
         "NaN and N for a signalling NaN."))),
    Document("argparse", (
        ("What are the main classes of this module and how do they work together?",
         "ArgumentParser holds the arguments that a program takes. Each call of add_argument makes an action, which says what to do with the strings of "
         "the command line. parse_args returns a Namespace with one attribute per argument, and HelpFormatter writes the usage and the help."),
        ("How does the module treat optional and positional arguments?",
         "An argument whose name begins with a prefix character is optional and is found by its flag. The others are positional and are matched in "
         "their order by a pattern of how many strings each of them takes."))),
    Document("try,raise,exceptions,assert,with,context-managers,specialnames", (
        ("Compare how these chapters treat errors and clean-up.",
         "The first one describes the try statement: an except clause names the exceptions that it handles, and the finally clause runs whatever "
         "happens. Another one describes the with statement, which calls the methods __enter__ and __exit__ of a context manager, so that clean-up is "
         "part of the object."),
        ("When does a finally clause run, and what if it returns?",
         "It runs when the try block ends in any way, also after a return, a break or an exception that nobody handled. If it has a return of its own, "
         "the saved exception is lost and that value is returned."))),
    Document("inspect", (
        ("What can a program learn about a function with this module?",
         "It can get the signature with the names, defaults and annotations of the parameters, the source code and the file it stands in, the "
         "documentation string and whether the function is a generator, a coroutine or built in."),)),
)
SHARED = DOCUMENTS[0]
CODE = ("argparse", "ast", "tarfile", "typing", "_pydecimal", "inspect", "pydoc", "doctest", "configparser", "subprocess")
TASKS = (
    "A train leaves at 9:40 and takes 3 hours and 25 minutes to the next city. It waits there for 18 minutes and then goes back at half the speed. When "
    "is it home again? Think step by step, check every step twice and explain each of them at length.",
    "A farmer has chickens and rabbits, 35 heads and 94 feet. How many of each are there? Try three different ways to find it, explain each at length "
    "and compare them.",
    "Plan a library for a town of 20,000 people: rooms, books, staff and money. Reason about every choice in detail before you make it, and weigh it "
    "against two others.",
    "Find all integers n for which n squared minus 5 n plus 6 is a prime number. Reason step by step, look at every case in detail, and then check your "
    "answer.",
)


def document_qa(maker: PromptMaker, wanted: Wanted) -> Work:
    """Raises ``ValueError`` where a document is shorter than the prompts should be."""
    rng = random.Random(f"document-qa {wanted.seed}")
    if wanted.share_document:
        chosen = [(SHARED, pair) for pair in SHARED.questions]
    else:
        chosen = [(document, pair) for document in DOCUMENTS for pair in document.questions]
    rng.shuffle(chosen)
    numbers = _numbers(rng, wanted.requests)
    longest = max(len(maker.encode("\n\n" + question)) for document, (question, _) in chosen)
    around = len(maker.wrapped([])) + longest + 16
    jobs = []
    for index in range(wanted.requests):
        document, (question, answer) = chosen[index % len(chosen)]
        # The number keeps a question that is asked twice from being one prompt.
        ids = [*_cut(maker, document.source, wanted.tokens - around, 0 if wanted.share_document else rng.randrange(64)),
               *maker.encode(f"\n\nQuestion {numbers[index]}. {question}")]
        jobs.append(Job(f"document-qa-{index}", maker.wrapped(ids), wanted.output_tokens, continuation=tuple(maker.encode(answer)[:_CONTINUATION])))
    shared = (maker.wrapped(_cut(maker, SHARED.source, wanted.tokens - around, 0)),) if wanted.share_document else ()
    notes = ("all prompts begin with one document, which prefill has in its cache",) if shared else ()
    return Work("document-qa", "questions about long documents", jobs, notes=notes, shared=shared)


def code(maker: PromptMaker, wanted: Wanted) -> Work:
    """A module's source up to some place; what follows there is known. Raises ``ValueError`` for prompts longer than the modules."""
    if wanted.share_document:
        raise ValueError("code asks how a text goes on: its prompts cannot share one and differ")
    rng = random.Random(f"code {wanted.seed}")
    long_enough = [ids for ids in (_ids(maker, name) for name in CODE) if len(ids) > wanted.tokens + _CONTINUATION]
    if not long_enough:
        raise ValueError(f"no module here has {wanted.tokens} tokens")
    jobs = []
    for index in range(wanted.requests):
        ids = rng.choice(long_enough)
        start = rng.randrange(len(ids) - wanted.tokens - _CONTINUATION)
        end = start + wanted.tokens
        jobs.append(Job(f"code-{index}", ids[start:end], wanted.output_tokens, continuation=tuple(ids[end : end + _CONTINUATION])))
    return Work("code", "a module's source, to be continued", jobs)


def reasoning(maker: PromptMaker, wanted: Wanted) -> Work:
    """A short prompt with a long answer."""
    rng = random.Random(f"reasoning {wanted.seed}")
    jobs = [Job(f"reasoning-{i}", maker.chat(f"Task {number}. {TASKS[i % len(TASKS)]}"), wanted.long_output)
            for i, number in enumerate(_numbers(rng, wanted.requests))]
    return Work("reasoning", f"a short task, {wanted.long_output} tokens of answer", jobs)


def _numbers(rng: random.Random, count: int) -> list[int]:
    """Different ones."""
    return rng.sample(range(100, 1000 + count), count)


def _cut(maker: PromptMaker, source: str, tokens: int, skip: int) -> list[int]:
    ids = _ids(maker, source)[skip : skip + tokens]
    if len(ids) < tokens or tokens < 1:
        raise ValueError(f"a document of {tokens} tokens is wanted, {source} has {len(ids)} after {skip}")
    return ids


@lru_cache(maxsize=32)
def _ids(maker: PromptMaker, source: str) -> list[int]:
    """Token ids of a module's source or of documentation topics, at most 16,000."""
    topics = pydoc_data.topics.topics
    names = source.split(",")
    if names[0] in topics:
        text = "\n\n".join(topics[name] for name in names if name in topics)
    else:
        text = inspect.cleandoc((Path(sysconfig.get_paths()["stdlib"]) / f"{source}.py").read_text())
    return maker.encode(text[: 16_000 * _CHARACTERS_PER_TOKEN])[:16_000]
