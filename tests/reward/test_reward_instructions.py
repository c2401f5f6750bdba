"""IFEval: every instruction with answers made by hand and by rule that follow it, and that do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from raising import raises_with

from hybridrl.reward import RewardError, default_compute_score
from hybridrl.reward.score import check_ground_truth
from hybridrl.reward.score.instructions import CHECKS, sentence_count

OF_LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
Case = tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]

#: instruction, arguments, responses that follow it, and others
BY_HAND: tuple[Case, ...] = (
    (
        "keywords:existence",
        {"keywords": ["river", "old bridge"]},
        ("The River flows under the old bridge.", "rivers, Old Bridges", "OLD BRIDGE RIVER"),
        ("The river.", "An old stone bridge over a river", "riv er old bridge"),
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["bad", "not so"]},
        ("A badge.", "All is fine", "not at all so", "Baden"),
        ("It is bad.", "BAD!", "That is not so good", "bad"),
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ("Dear [name], at [address].", "[a][b][c]", "[x] and\n[y]"),
        ("Dear [name].", "none", "(a) (b)", "[a\nb] [c]"),
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ("Text\nP.S. more", "Text\n\np.s. more", "Text. P.S more", "Text\nP. S. more"),
        ("Text", "Text\nPostscript: more", "Text\nNB. more"),
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ("Text\nP.P.S more", "Text\nP.P.S. more"),
        ("Text\nP.S. more", "Text"),
    ),
    (
        "detectable_format:constrained_response",
        {},
        ("My answer is yes.", "My answer is no.", "Well. My answer is maybe."),
        ("Yes.", "My answer is yes", "my answer is no.", "My answer is: maybe."),
    ),
    (
        "detectable_format:json_format",
        {},
        ('{"a": 1}', "[1, 2]", '```json\n{"a": [1]}\n```', '```\n"x"\n```', "3"),
        ("{'a': 1}", "Here: {}", '{"a": 1', "```json\n{a}\n```", "a"),
    ),
    (
        "detectable_format:title",
        {},
        ("<<A title>>\nText", "Text <<t>>", "<< two words >>"),
        ("<A title>", "<< >>", "<<>>", "<<a\nb>>", "Title: x"),
    ),
    (
        "combination:two_responses",
        {},
        ("One.\n******\nTwo.", "One.******Two.", "******One.******Two.******"),
        ("One.", "One.\n******\nOne.", "One.\n***\nTwo.", "A******B******C", "A************B"),
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ("Write a poem.\nRoses", "write a poem. Roses", "  Write a poem.  "),
        ("Roses", "Sure: Write a poem.", "Write a poem", "Write the poem."),
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ("So. That is all.", "that is ALL.", '"Yes. That is all."', "That is all.\n"),
        ("That is all. Bye.", "That is all", "All."),
    ),
    ("startend:quotation", {}, ('"Text."', ' "A\nb" ', '""'), ('"Text', 'Text"', "'Text'", '"', "Text", '"A" b')),
    ("punctuation:no_comma", {}, ("No marks here.", "a; b"), ("a, b", ",", "1,000")),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ("*one* and *two*", "**one** and *two*", "*a*\n*b*\n*c*"),
        ("*one*", "none", "* *\n* *", "one* two"),
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ("Section 1\na\nSection 2\nb", "Intro\nSection 1 a Section 2 b", "Section 1 a Section 2 b Section 3 c"),
        ("Section 1\na", "Part 1\nPart 2", "Section one\nSection two"),
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ("One.\n\nPresident x.", 'One.\n\n"President" x', "One.\n\npresident, x", "A b\nc\n\nPRESIDENT"),
        ("President.\n\nOne.", "One. President.", "One.\n\nPresidents", "A\n\npresident\n\nB", "One.\n\nThe president"),
    ),
)


def counted() -> Iterator[Case]:
    """Instructions about numbers: what has n of something follows `at least m` for n >= m, `less than m` for n < m."""
    for relation in ("at least", "less than"):
        for number in (1, 3, 5):

            def split(make: Any, number: int = number, relation: str = relation) -> tuple[Any, Any]:
                counts = range(8)
                follows = [n for n in counts if (n >= number) == (relation == "at least")]
                return tuple(map(make, follows)), tuple(make(n) for n in counts if n not in follows)

            yield (
                "keywords:frequency",
                {"keyword": "sun", "frequency": number, "relation": relation},
                *split(lambda n: "Look: " + "the Sun " * n),
            )
            yield (
                "keywords:letter_frequency",
                {"letter": "Q", "let_frequency": number, "let_relation": relation},
                *split(lambda n: "some text " + "qQ"[n % 2] * n),
            )
            yield (
                "length_constraints:number_words",
                {"num_words": number, "relation": relation},
                *split(lambda n: "! " + "word, " * n),
            )
            yield (
                "length_constraints:number_sentences",
                {"num_sentences": number, "relation": relation},
                *split(lambda n: "... " + "Mr. Smith left at 3.50 today! " * n),
            )
            yield (
                "change_case:capital_word_frequency",
                {"capital_frequency": number, "capital_relation": relation},
                *split(lambda n: "Some words " + "LOUD-VOICE it's " * n),
            )
    for number in (1, 2, 3, 5):
        yield (
            "length_constraints:number_paragraphs",
            {"num_paragraphs": number},
            ("\n***\n".join(["Text."] * number), " *** ".join(["Text."] * number) + "\n***"),
            ("\n***\n".join(["Text."] * (number + 1)), "\n\n".join(["Text."] * (number + 1)) + "\n***\nb" * number),
        )
        yield (
            "detectable_format:number_bullet_lists",
            {"num_bullets": number},
            ("Intro\n" + "* point\n" * number, "- point\n" * number, "  * point\n" * number + "**bold** end"),
            ("* point\n" * (number + 1), "- point\n" * (number - 1) + "end", "1. point\n" * number),
        )


def judged(name: str, arguments: dict[str, Any], response: str) -> dict[str, Any]:
    result = default_compute_score("ifeval", response, json.dumps({"ids": [name], "kwargs": [arguments]}))
    assert isinstance(result, dict)
    return result


def test_answers_are_judged_as_they_were_made() -> None:
    cases = [*BY_HAND, *counted()]
    assert {name for name, *_ in cases} == CHECKS.keys() - OF_LANGUAGE
    assert sum(len(right) + len(wrong) for _, _, right, wrong in cases) >= 300
    faults = []
    for name, arguments, right, wrong in cases:
        faults += [(name, text) for text in right if not judged(name, arguments, text)["acc"]]
        faults += [(name, text, "wrong") for text in wrong if judged(name, arguments, text)["acc"]]
    assert not faults, (len(faults), faults[:20])


def test_a_loose_check_takes_a_response_without_its_ends_and_emphasis() -> None:
    ending = {"end_phrase": "That is all."}
    framed = judged("startend:end_checker", ending, "Sure!\nText. **That is all.**\nAnything else?")
    assert (framed["acc"], framed["loose"]) == (False, True)
    assert not judged("startend:end_checker", ending, "Text.\nWas it?\nYes.\nNo.")["loose"]
    truth = {"ids": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    half = default_compute_score("ifeval", "no comma", json.dumps(truth))
    assert isinstance(half, dict) and (half["score"], half["followed"], half["followed_loose"]) == (0.0, 0.5, 0.5)
    assert not judged("punctuation:no_comma", {}, " \n")["loose"], "an empty response follows nothing"
    assert judged("punctuation:no_comma", {}, "<think>a, b</think>\nplain")["acc"], "thoughts are no response"


@pytest.mark.parametrize("name", sorted(OF_LANGUAGE))
def test_instructions_about_languages_say_what_they_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)  # as where it is not installed
    truth = {"ids": [name], "kwargs": [{"language": "de"}]}
    with raises_with(RewardError, name, "langdetect", "ifeval"):
        check_ground_truth(json.dumps(truth), "ifeval")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "language:response_language",
            "Das ist ein deutscher Satz über das Wetter.",
            "This is about the weather today.",
        ),
        ("change_case:english_capital", "THIS IS A LOUD ANSWER ABOUT THE WEATHER.", "This is an answer."),
        ("change_case:english_lowercase", "this is a quiet answer about the weather.", "This is an answer."),
    ],
)
def test_languages_are_recognised(name: str, right: str, wrong: str) -> None:
    assert judged(name, {"language": "de"}, right)["acc"] and not judged(name, {"language": "de"}, wrong)["acc"]


@pytest.mark.parametrize(
    ("truth", "facts"),
    [
        ({"ids": ["a:b"], "kwargs": [{}]}, ("'a:b'", "punctuation:no_comma")),
        ({"ids": ["keywords:frequency"], "kwargs": [{"keyword": "x"}]}, ("'keywords:frequency'", "relation")),
        ({"ids": ["punctuation:no_comma"], "kwargs": []}, ("ids", "kwargs")),
        ({"ids": []}, ("ids",)),
        ("text", ("ids",)),
    ],
)
def test_truths_that_no_check_reads_are_refused(truth: Any, facts: tuple[str, ...]) -> None:
    with raises_with(RewardError, "ifeval", *facts):
        check_ground_truth(truth if isinstance(truth, str) else json.dumps(truth), "ifeval")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One. Two! Three?", 3),
        ("Dr. Who met Mrs. X.", 1),
        ("It costs 3.50. Yes", 2),
        ('He said "No." Then left.', 2),
        ("Wait... what?!", 2),
        ("no end", 1),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert sentence_count(text) == count
