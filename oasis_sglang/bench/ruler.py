"""Questions with known answers about facts that are spread over a long text, in the manner of RULER (arXiv 2404.06654).

The text is documentation of the Python that runs this; facts, names and questions are ours. An answer is begun for the model, so
that a small one has to name what it found and nothing else.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from oasis_sglang.bench.jobs import Job, Wanted, Work
from oasis_sglang.prompts import PromptMaker

ADJECTIVES = ("amber", "brisk", "calm", "dusty", "eager", "faded", "gentle", "hollow", "ivory", "jolly", "keen", "lively", "mellow", "narrow", "olive", "plain",
               "quiet", "rapid", "silver", "tidy", "upper", "velvet", "windy", "young")
NOUNS = ("anchor", "badger", "canyon", "dragon", "engine", "falcon", "garden", "harbor", "island", "jacket", "kettle", "ladder", "market", "needle", "orchard",
          "pocket", "quarry", "ribbon", "saddle", "tunnel", "valley", "window", "yard", "zebra")
PEOPLE = ("Alice", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karla", "Louis", "Maria", "Nadia", "Oscar", "Paula")
_CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Geneva", "Havana", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague", "Rome", "Sofia", "Tokyo", "Vienna",
           "Warsaw")
INSTANCES = 16
"""Questions about one shared document, at most."""
NUMBER_TOKENS = 10
"""At most, of the number of a question about a shared document."""
DISTRACTORS = 8
VALUES = 4
OTHERS = 3
"""``multi-hop``: so many people work at other offices, so that no city is the answer for being the only one."""
COMMON, OFTEN, SELDOM, ROUNDS = 10, 30, 3, 5
"""``common-words``: so many words stand in the list ``OFTEN`` times. The others come ``SELDOM`` times each until the list is full, in a long
list several times over, ``ROUNDS`` at most: half as often as the common ones."""
_CONTINUATION = 64


class Asked(NamedTuple):
    """``facts`` go into the text, in this order; ``begun`` is how the answer begins."""

    facts: list[str]
    question: str
    begun: str
    answers: tuple[str, ...]


def needle(rng: random.Random, names: Sequence[str]) -> Asked:
    name, code = names[0], _number(rng)
    return Asked([f"The lucky number of {name} is: {code}."], f"What is the lucky number of {name} that the text mentions?",
                 f"The lucky number of {name} that the text mentions is", (code,))


def needles(rng: random.Random, names: Sequence[str]) -> Asked:
    """The same among others of its kind."""
    asked = needle(rng, names)
    others = [f"The lucky number of {name} is: {_number(rng)}." for name in names[1 : 1 + DISTRACTORS]]
    place = rng.randrange(len(others) + 1)
    return asked._replace(facts=[*others[:place], *asked.facts, *others[place:]])


def multivalue(rng: random.Random, names: Sequence[str]) -> Asked:
    name, codes = names[0], tuple(_number(rng) for _ in range(VALUES))
    return Asked([f"A lucky number of {name} is: {code}." for code in codes], f"The text mentions {VALUES} lucky numbers of {name}. What are they?",
                 f"The lucky numbers of {name} that the text mentions are", codes)


def tracking(rng: random.Random, names: Sequence[str]) -> Asked:
    """A value that is handed on from variable to variable."""
    variables = tuple("".join(rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5)) for _ in range(VALUES))
    value = _number(rng)[:5]
    chain = [f"VAR {variables[0]} = {value}", *(f"VAR {after} = VAR {before}" for before, after in zip(variables, variables[1:]))]
    return Asked(chain, f"In the text, variables are set to numbers or to other variables. Which variables have the value {value}?",
                 f"The variables with the value {value} are", variables)


def multi_hop(rng: random.Random, names: Sequence[str]) -> Asked:
    """Two facts have to be joined: the question names a person, and only the text names the office."""
    offices, surnames = names[: 1 + OTHERS], names[1 + OTHERS : 2 * (1 + OTHERS)]
    people = [f"{rng.choice(PEOPLE)} {name.title()}" for name in surnames]  # no two alike, also where one document has several questions
    cities = rng.sample(_CITIES, 1 + OTHERS)
    facts = [f"{person} works at the {office} office." for person, office in zip(people, offices)]
    facts += [f"The {office} office is in {city}." for office, city in zip(offices, cities)]
    rng.shuffle(facts)
    return Asked(facts, f"In which city does {people[0]} work?", f"{people[0]} works in the city of", (cities[0],))


TASKS: dict[str, tuple[str, Callable[[random.Random, Sequence[str]], Asked]]] = {
    "needle": ("one fact in a long text", needle),
    "needles": (f"one fact among {DISTRACTORS} others of its kind", needles),
    "multivalue": (f"{VALUES} facts about one name", multivalue),
    "tracking": (f"a value handed on through {VALUES} variables", tracking),
    "multi-hop": ("two facts that have to be joined", multi_hop),
}


def make(name: str, maker: PromptMaker, wanted: Wanted) -> Work:
    """A workload of one of ``TASKS``. Raises ``ValueError`` when the facts leave no room for a text."""
    description, task = TASKS[name]
    rng = random.Random(f"{name} {wanted.seed}")
    if not wanted.share_document:
        asked = [task(rng, _names(rng)) for _ in range(wanted.requests)]
        documents = [_document(maker, one.facts, wanted.tokens - _around(maker, one), rng) for one in asked]
        jobs = [_job(maker, name, i, one, document, wanted) for i, (one, document) in enumerate(zip(asked, documents))]
        return Work(name, description, jobs)
    fixed = random.Random(f"{name} document")
    names = _names(fixed)
    asked = _half_filling([task(fixed, names[i * (1 + DISTRACTORS) :]) for i in range(INSTANCES)], maker, wanted.tokens)
    document = _document(maker, [fact for one in asked for fact in one.facts], wanted.tokens - NUMBER_TOKENS - max(_around(maker, one) for one in asked), fixed)
    numbers = random.Random(f"{name} questions {wanted.seed}")
    order = [index for _ in range(-(-wanted.requests // len(asked))) for index in rng.sample(range(len(asked)), len(asked))]
    # A number keeps a question that is asked again, here or in another run, from being a prompt that prefill has.
    jobs = [_job(maker, name, i, asked[which]._replace(question=f"Question {numbers.randrange(100_000)}. {asked[which].question}"), document, wanted)
            for i, which in enumerate(order[: wanted.requests])]
    note = f"all prompts begin with one document, which prefill has in its cache, with the facts of {len(asked)} questions"
    return Work(name, description, jobs, notes=(note,), shared=(maker.wrapped(document),))


def common_words(maker: PromptMaker, wanted: Wanted) -> Work:
    """A list of words, in which ``COMMON`` words stand ``OFTEN`` times. Raises ``ValueError`` when the list would have no other words, or
    when there are too few of them to fill it."""
    if wanted.share_document:
        raise ValueError("common-words has one question for a list: its prompts cannot share one")
    rng = random.Random(f"common-words {wanted.seed}")
    jobs = []
    for index in range(wanted.requests):
        names = _names(rng)
        asked = Asked([], f"What are the {COMMON} words that stand in the list above most often?", "The most common words are", tuple(names[:COMMON]))
        room = wanted.tokens - _around(maker, asked)
        pieces = {word: maker.encode(" " + word) for word in names}
        listed = [word for word in names[:COMMON] for _ in range(OFTEN)]
        room -= sum(len(pieces[word]) for word in listed)
        for word in (other for _ in range(ROUNDS) for other in names[COMMON:] for _ in range(SELDOM)):
            room -= len(pieces[word])
            if room < 0:
                break
            listed.append(word)
        else:
            raise ValueError(f"a list of words has {wanted.tokens - room} tokens at most, {wanted.tokens} are wanted")
        if len(listed) <= COMMON * OFTEN:
            raise ValueError(f"common-words needs more than {wanted.tokens} tokens: its common words alone take {-room + wanted.tokens}")
        rng.shuffle(listed)
        jobs.append(_job(maker, "common-words", index, asked, [token for word in listed for token in pieces[word]], wanted))
    return Work("common-words", f"the {COMMON} most common words of a list", jobs)


def _job(maker: PromptMaker, name: str, index: int, asked: Asked, document: list[int], wanted: Wanted) -> Job:
    prompt = maker.wrapped([*document, *maker.encode("\n\n" + asked.question)], asked.begun)
    right = maker.encode(" " + ", ".join(asked.answers) + ".")[:_CONTINUATION]
    return Job(f"{name}-{index}", prompt, wanted.output_tokens, answers=asked.answers, continuation=tuple(right))


def _around(maker: PromptMaker, asked: Asked) -> int:
    """Tokens of a prompt beside its document."""
    return len(maker.wrapped(maker.encode("\n\n" + asked.question), asked.begun))


def _half_filling(asked: list[Asked], maker: PromptMaker, tokens: int) -> list[Asked]:
    """As many of the first ones as take half of the document, one at least."""
    kept: list[Asked] = []
    for one in asked:
        tokens -= 2 * sum(len(maker.encode("\n\n" + fact)) for fact in one.facts)
        if kept and tokens < 0:
            break
        kept.append(one)
    return kept


def _document(maker: PromptMaker, facts: Sequence[str], tokens: int, rng: random.Random) -> list[int]:
    """``tokens`` token ids of prose with the facts in their order at random places, each a paragraph."""
    told = [maker.encode("\n\n" + fact) for fact in facts]
    room = tokens - sum(map(len, told))
    if room < len(told):
        raise ValueError(f"{len(facts)} facts take {sum(map(len, told))} tokens, the document has {tokens}")
    pool, start = _paragraphs(maker), rng.randrange(1000)
    chosen: list[list[int]] = []
    while room > 0:
        paragraph = pool[(start + len(chosen)) % len(pool)][:room]
        chosen.append(paragraph)
        room -= len(paragraph)
    places = sorted(rng.randrange(len(chosen)) for _ in told)  # never after the last paragraph: the question stands there
    document: list[int] = []
    for place, paragraph in enumerate(chosen):
        for fact, at in zip(told, places):
            if at == place:
                document += fact
        document += paragraph
    return document


@lru_cache(maxsize=4)
def _paragraphs(maker: PromptMaker) -> list[list[int]]:
    """Paragraphs of the Python documentation as token ids, each with the line break before it."""
    topics = pydoc_data.topics.topics
    texts = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n") if 80 < len(paragraph) < 1500]
    return [maker.encode("\n\n" + text) for text in texts]


def _names(rng: random.Random) -> list[str]:
    """All names, in random order."""
    names = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    rng.shuffle(names)
    return names


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))
