"""Workloads: sizes, answers that are really there, and nothing that depends on when they were made."""

import json
import re
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from oasis_sglang import models
from oasis_sglang.bench import documents, ruler, workloads
from oasis_sglang.bench.jobs import Wanted
from oasis_sglang.bench.load import conversations
from oasis_sglang.prompts import PromptMaker
from transport.errors import ConfigError

ONE_PROMPT = [*ruler.TASKS, "document-qa", "code"]


@pytest.fixture(scope="module")
def maker():
    return PromptMaker(models.prepare(models.CUT_LAYERS))


def make(maker, name, **wanted):
    return workloads.make(name, maker, Wanted(**{"tokens": 2000, "requests": 5, "turns": 4, **wanted}))


@pytest.mark.parametrize("name", [*ONE_PROMPT, "common-words"])
def test_prompts_have_the_length_that_was_asked_for(maker, name):
    work = make(maker, name)
    assert len(work.jobs) == 5
    assert all(1980 <= len(job.prompt) <= 2000 for job in work.jobs), [len(job.prompt) for job in work.jobs]


@pytest.mark.parametrize("name", list(workloads.NAMES))
def test_no_text_has_a_special_token_but_those_of_the_chat(maker, name):
    listed = json.loads((models.prepare(models.CUT_LAYERS) / "tokenizer.json").read_text())["added_tokens"]
    special = {token["id"] for token in listed} - {token["id"] for token in listed if token["content"] in ("<|im_start|>", "<|im_end|>")}
    assert len(special) > 2
    for job in make(maker, name).jobs:
        assert not special & {*job.prompt, *job.continuation}


@pytest.mark.parametrize("name", ["needle", "document-qa", "reasoning"])
def test_no_prompt_comes_twice(maker, name):
    for seed in range(20):
        jobs = make(maker, name, requests=16, seed=seed, share_document=name != "reasoning").jobs
        assert len({tuple(job.prompt) for job in jobs}) == 16


@pytest.mark.parametrize("name", list(workloads.NAMES))
def test_the_seed_decides(maker, name):
    first, again, other = (make(maker, name, seed=seed).digest for seed in (1, 1, 2))
    assert first == again != other
    names = [job.name for job in make(maker, name).jobs]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["needle", "needles", "multivalue", "multi-hop", "tracking"])
def test_answers_are_in_the_text_and_not_in_what_is_begun(maker, name):
    for job in make(maker, name).jobs:
        text = maker.decode(job.prompt)
        document, _, question = text.rpartition("\n\n")
        for answer in job.answers:
            assert answer in document
            assert answer not in question.partition("assistant")[2]
        assert all(answer in maker.decode(job.continuation) for answer in job.answers)


def test_a_needle_stands_once_in_its_sentence_and_others_beside_it(maker):
    for job in make(maker, "needles").jobs:
        text = maker.decode(job.prompt)
        name = text.rpartition("The lucky number of ")[2].removesuffix(" that the text mentions is")
        assert text.count(f"The lucky number of {name} is: {job.answers[0]}.") == 1
        assert text.count("The lucky number of ") == 1 + ruler.DISTRACTORS + 1  # the last begins the answer


def test_needles_lie_at_different_depths(maker):
    work = make(maker, "needle", requests=12)
    depths = [maker.decode(job.prompt).index(job.answers[0]) / len(maker.decode(job.prompt)) for job in work.jobs]
    assert min(depths) < 0.4 and max(depths) > 0.6


def test_a_chain_of_variables_leads_from_the_value_to_each(maker):
    for job in make(maker, "tracking").jobs:
        text = maker.decode(job.prompt)
        value = text.rpartition("value ")[2].split()[0]
        known = set()
        for line in text.splitlines():
            words = line.split()
            if len(words) >= 4 and words[0] == "VAR" and words[2] == "=" and (words[3] == value or (words[3] == "VAR" and words[4] in known)):
                known.add(words[1])
        assert known == set(job.answers), "in one pass: the chain stands in its order"


@pytest.mark.parametrize("share", [False, True])
def test_a_hop_needs_both_facts(maker, share):
    work = make(maker, "multi-hop", tokens=5000, share_document=share)
    for job in work.jobs:
        document, _, question = maker.decode(job.prompt).rpartition("\n\n")
        works = re.findall(r"(\S+ \S+) works at the (\S+) office\.", document)
        cities = dict(re.findall(r"The (\S+) office is in (\w+)\.", document))
        offices = dict(works)
        assert len(offices) == len(works) == len(cities) >= 1 + ruler.OTHERS, "no person works twice, no office lies in two cities"
        asked = re.search(r"In which city does (\S+ \S+) work\?", question).group(1)
        assert (cities[offices[asked]],) == job.answers
        assert not any(office in question for office in cities), "the fact that joins is in the document only"
        assert len(set(cities.values())) > ruler.OTHERS


def test_common_words_are_the_most_common_ones(maker):
    for job in make(maker, "common-words", tokens=4000).jobs:
        words = Counter(maker.decode(job.prompt).split("\n\n")[0].split())
        assert {word for word, _ in words.most_common(ruler.COMMON)} == set(job.answers)
        assert all(words[word] == ruler.OFTEN for word in job.answers)
        assert max(n for word, n in words.items() if word not in job.answers) <= ruler.SELDOM


def test_a_long_list_repeats_its_other_words_and_one_too_long_is_refused(maker):
    job = make(maker, "common-words", tokens=12_000, context=16_384, requests=1).jobs[0]
    assert 11_980 <= len(job.prompt) <= 12_000
    words = Counter(maker.decode(job.prompt).split("\n\n")[0].split())
    assert {word for word, n in words.items() if n == ruler.OFTEN} == set(job.answers)
    assert ruler.SELDOM < max(n for word, n in words.items() if word not in job.answers) <= ruler.OFTEN // 2
    with pytest.raises(ConfigError, match="100000 are wanted"):
        make(maker, "common-words", tokens=100_000, context=131_072)


@pytest.mark.parametrize("name", [*ruler.TASKS, "document-qa"])
def test_prompts_may_share_a_document_which_no_seed_changes(maker, name):
    one, two = (make(maker, name, tokens=5000, share_document=True, seed=seed) for seed in (1, 2))
    assert one.shared == two.shared and one.digest != two.digest and one.notes
    document = one.shared[0]
    end = len(maker.encode("<|im_end|>\n<|im_start|>assistant\n"))
    for job in one.jobs:
        assert job.prompt[: len(document) - end] == document[:-end]
        assert all(answer in maker.decode(document) for answer in job.answers)
    assert len({tuple(job.prompt) for job in one.jobs}) == len(one.jobs)


def test_a_small_shared_document_has_fewer_questions_and_asks_them_again(maker):
    work = make(maker, "needles", tokens=1000, share_document=True, requests=6)
    text = maker.decode(work.shared[0])
    assert text.count("The lucky number of ") < ruler.INSTANCES * (1 + ruler.DISTRACTORS)
    assert len({job.answers for job in work.jobs}) == text.count("The lucky number of ") // (1 + ruler.DISTRACTORS) < 6
    assert len({tuple(job.prompt) for job in work.jobs}) == 6, "but no prompt twice"
    assert not {tuple(job.prompt) for job in work.jobs} & {tuple(job.prompt) for job in make(maker, "needles", tokens=1000, share_document=True, requests=6, seed=1).jobs}


@pytest.mark.parametrize("name", ["code", "common-words"])
def test_what_cannot_share_a_document_says_so(maker, name):
    with pytest.raises(ConfigError, match=name):
        make(maker, name, share_document=True)


@pytest.mark.parametrize("name", ["agent", "chat", "reasoning"])
def test_what_has_no_document_to_share_is_told_in_the_notes(maker, name):
    assert any("no document is shared" in note for note in make(maker, name, share_document=True).notes)
    assert not any("no document is shared" in note for note in make(maker, name).notes)


def test_code_goes_on_as_the_source_does(maker):
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [(library / f"{name}.py").read_text() for name in documents.CODE]
    for job in make(maker, "code").jobs:
        assert len(job.continuation) == 64
        assert not job.answers
        # A cut may lie within a character, so that the first one is not compared.
        assert any(maker.decode([*job.prompt, *job.continuation])[1:] in source for source in sources)


def test_an_agent_has_a_long_first_turn_and_short_ones(maker):
    work = make(maker, "agent", requests=8, turns=6, tokens=3000)
    chains = conversations(work.jobs)
    assert [len(chain) for chain in chains] == [6, 6]
    for chain in chains:
        assert 2700 <= len(chain[0].prompt) <= 3000
        assert all(40 <= len(job.prompt) <= 200 and 16 <= job.output_tokens <= 32 for job in chain[1:])
    assert chains[0][0].prompt != chains[1][0].prompt
    tokens = dict(zip((job.name for job in work.jobs), work.prompt_tokens()))
    last, before = chains[0][-1], chains[0][-2]
    assert tokens[last.name] == tokens[before.name] + before.output_tokens + len(last.prompt)


def test_conversations_of_a_chat_share_their_system_prompt(maker):
    work = make(maker, "chat", requests=3, tokens=2000)
    first = [chain[0].prompt for chain in conversations(work.jobs)]
    same = next(i for i, tokens in enumerate(zip(*first)) if len(set(tokens)) > 1)
    assert len(first) == 3 and same > 1700


def test_a_long_conversation_leaves_its_first_turn_less_room(maker):
    work = make(maker, "agent", tokens=8000, turns=10, context=8192)
    assert max(a + j.output_tokens for a, j in zip(work.prompt_tokens(), work.jobs)) <= 8192
    assert any("of 8000 tokens" in note for note in work.notes)
    with pytest.raises(ConfigError, match="40 turns"):
        make(maker, "agent", turns=40, context=8192)


def test_what_does_not_fit_the_model_is_refused_with_both_numbers(maker):
    with pytest.raises(ConfigError, match="context is 2048"):
        make(maker, "needle", tokens=2040, output_tokens=64, context=2048)


def test_reasoning_is_short_in_and_long_out(maker):
    work = make(maker, "reasoning", long_output=300)
    assert all(len(job.prompt) < 120 and job.output_tokens == 300 for job in work.jobs)


def test_arrivals_have_the_rate_and_are_in_order(maker):
    jobs = make(maker, "reasoning", requests=400, rate=8.0).jobs
    assert jobs[0].arrival == 0
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    assert 0.8 < jobs[-1].arrival / (399 / 8) < 1.2
    assert all(job.arrival is None for job in make(maker, "agent", rate=2.0).jobs if job.after)
    assert make(maker, "needle").jobs[1].arrival is None


def test_a_workload_is_described_by_what_it_has(maker):
    work = make(maker, "agent")
    about = workloads.describe(work)
    assert (about.requests, about.digest, about.scored) == (4, work.digest, False)
    assert about.prompt_tokens[0] <= about.prompt_tokens[1] <= about.prompt_tokens[2] == max(work.prompt_tokens())
    assert workloads.describe(make(maker, "needle")).scored


def test_turns_have_the_lengths_stated_at_every_seed(maker):
    lengths = [len(job.prompt) for seed in range(20) for job in make(maker, "agent", seed=seed, turns=13).jobs if job.after]
    assert min(lengths) >= 40 and max(lengths) <= 200 and max(lengths) - min(lengths) > 100


@pytest.mark.parametrize("wanted", [{"requests": 0}, {"turns": 0}, {"tokens": 0}, {"output_tokens": 0}, {"long_output": -1}, {"rate": 0.0}, {"rate": -1.0}])
@pytest.mark.parametrize("name", ["code", "chat", "reasoning"])
def test_less_than_one_of_anything_is_refused_by_name(maker, name, wanted):
    with pytest.raises(ConfigError, match=next(iter(wanted))) as caught:
        make(maker, name, **wanted)
    assert str(next(iter(wanted.values()))) in str(caught.value)


def test_an_unknown_workload_is_told_what_there_is(maker):
    with pytest.raises(ConfigError, match="needle"):
        make(maker, "nedle")
