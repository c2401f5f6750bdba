"""IFEval: whether a response follows the instructions of its prompt, each of which a program can check.

The ground truth is `{"ids": [...], "kwargs": [{...}, ...]}`, as JSON: an instruction's id and its arguments. The checks
follow the definitions of arXiv 2311.07911 (Zhou et al. 2023, table 1). Strict: the response as it is. Loose: one of
eight versions of it, with or without its first line, its last line, and emphasis (`*`).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.errors import RewardError

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}
_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|e\.g|i\.e|U\.S)\.")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _check(name: str) -> Callable[[Check], Check]:
    """Function decorator: an instruction is followed where the function of (response, **arguments) returns true."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def _compared(count: int, relation: str, number: int) -> bool:
    """Whether a count is as demanded: `less than` a number, or `at least` that number."""
    return count < number if relation == "less than" else count >= number


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(word, text, re.IGNORECASE))


@_check("keywords:existence")
def _has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_occurrences(text, re.escape(word)) for word in keywords)


@_check("keywords:frequency")
def _has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(_occurrences(text, re.escape(keyword)), relation, frequency)


@_check("keywords:forbidden_words")
def _has_no_forbidden_word(text: str, forbidden_words: list[str]) -> bool:
    return not any(_occurrences(text, rf"\b{re.escape(word)}\b") for word in forbidden_words)


@_check("keywords:letter_frequency")
def _has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(Counter(text.lower())[letter.lower()], let_relation, let_frequency)


@_check("language:response_language")
def _is_in_language(text: str, language: str) -> bool:
    return _language_of(text) in (language, None)


@_check("length_constraints:number_sentences")
def _has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compared(sentence_count(text), relation, num_sentences)


@_check("length_constraints:number_paragraphs")
def _has_paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    if not all(part.strip() for part in parts[1:-1]):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


@_check("length_constraints:number_words")
def _has_words(text: str, num_words: int, relation: str) -> bool:
    return _compared(len(_words(text)), relation, num_words)


@_check("length_constraints:nth_paragraph_first_word")
def _has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = re.split(r"\n\n", text)
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    if not words:
        return False
    start = re.match(r"[\"']*([^.,?!'\"]*)", words[0])
    return start is not None and start[1].lower() == first_word.lower()


@_check("detectable_content:number_placeholders")
def _has_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


@_check("detectable_content:postscript")
def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.lower()
    letters = [re.escape(letter) for letter in marker if letter.isalpha()]
    is_abbreviated = marker in ("p.s.", "p.p.s")
    pattern = r"\.\s?".join(letters) + r"\.?" if is_abbreviated else re.escape(marker)
    return re.search(rf"\s*{pattern}.*$", text.lower(), re.MULTILINE) is not None


@_check("detectable_format:number_bullet_lists")
def _has_bullets(text: str, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


@_check("detectable_format:constrained_response")
def _is_constrained(text: str) -> bool:
    return any(option in text for option in _CONSTRAINED)


@_check("detectable_format:number_highlighted_sections")
def _has_highlights(text: str, num_highlights: int) -> bool:
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n*]*\*\*", text) if part.strip("*").strip()]
    return len(single) + len(double) >= num_highlights


@_check("detectable_format:multiple_sections")
def _has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) - 1 >= num_sections


@_check("detectable_format:json_format")
def _is_json(text: str) -> bool:
    inner = re.sub(r"^```(?:json|JSON|Json)?", "", text.strip()).removesuffix("```").strip()
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


@_check("detectable_format:title")
def _has_title(text: str) -> bool:
    return any(title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", text))


@_check("combination:two_responses")
def _has_two_responses(text: str) -> bool:
    parts = text.split("******")
    if not all(part.strip() for part in parts[1:-1]):
        return False
    answers = [part.strip() for part in parts if part.strip()]
    return len(answers) == 2 and answers[0] != answers[1]


@_check("combination:repeat_prompt")
def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_check("startend:end_checker")
def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_check("startend:quotation")
def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@_check("change_case:capital_word_frequency")
def _has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"\w+(?:[-'\u2019]\w+)*", text)
    return _compared(sum(word.isupper() for word in words), capital_relation, capital_frequency)


@_check("change_case:english_capital")
def _is_capital(text: str) -> bool:
    return text.isupper() and _language_of(text) in ("en", None)


@_check("change_case:english_lowercase")
def _is_lowercase(text: str) -> bool:
    return text.islower() and _language_of(text) in ("en", None)


@_check("punctuation:no_comma")
def _has_no_comma(text: str) -> bool:
    return "," not in text


#: instructions whose check asks for the language of the response
_OF_LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")


def sentence_count(text: str) -> int:
    """Return the number of sentences: of stretches that end with `.`, `!` or `?` before a space, and what is left."""
    text = _ABBREVIATIONS.sub(lambda match: match[0].replace(".", ""), text.strip())
    return sum(bool(re.search(r"\w", part)) for part in _SENTENCE_END.split(text))


def _language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of a text's language; None where it has no words to tell."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def read_truth(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the instructions of a ground truth: their ids with their arguments.

    Raises:
        RewardError: it is none, an instruction is unknown or lacks an argument, or langdetect is not installed.
    """
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        names, arguments = list(truth["ids"]), list(truth["kwargs"])
    except (ValueError, TypeError, KeyError):
        names, arguments = [], []
    if not names or len(names) != len(arguments):
        raise RewardError(f"the ground truth is {str(ground_truth)[:60]!r}; it must be ids and kwargs, one of each")
    instructions = []
    for name, values in zip(names, arguments, strict=True):
        if name not in CHECKS:
            raise RewardError(f"unknown instruction {name!r}; choose from {', '.join(CHECKS)}")
        code = CHECKS[name].__code__
        needed = code.co_varnames[1 : code.co_argcount]
        present = {key: value for key, value in (values or {}).items() if value is not None}
        if missing := [key for key in needed if key not in present]:
            raise RewardError(f"instruction {name!r} has no argument {', '.join(missing)}")
        if name in _OF_LANGUAGE:
            _require_langdetect(name)
        instructions.append((name, {key: present[key] for key in needed}))
    return instructions


def _require_langdetect(name: str) -> None:
    try:
        import langdetect  # noqa: F401  (looked for)
    except ImportError:
        raise RewardError(
            f"instruction {name!r} needs the package langdetect: pip install langdetect, or the extra ifeval"
        ) from None


#: what checks a ground truth before a run
check_ground_truth = read_truth


def _versions(text: str) -> set[str]:
    """Return the versions of a response of which a loose check asks for one."""
    lines = text.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    plain = ["\n".join(cut).strip() for cut in cuts]
    return {text, *plain, *(version.replace("*", "") for version in plain)}


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a response, which is not empty, follows an instruction."""
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score one response.

    Returns:
        `score` and `acc`: whether it follows all instructions, strictly; `loose`: whether it does loosely; `followed`
        and `followed_loose`: the share of its instructions that it follows.

    Raises:
        RewardError: see `read_truth`.
    """
    text = solution_str.rpartition("</think>")[2].strip()
    instructions = read_truth(ground_truth)
    strict = [follows(text, *instruction) for instruction in instructions]
    versions = _versions(text)
    loose = [any(follows(version, *instruction) for version in versions) for instruction in instructions]
    return {
        "score": float(all(strict)),
        "acc": all(strict),
        "loose": all(loose),
        "followed": sum(strict) / len(strict),
        "followed_loose": sum(loose) / len(loose),
    }
