"""Comparison of mathematical answers, and their extraction from text."""

import functools
import logging
import re
import threading

_LIMIT_S = 5  # seconds for parsing one expression and for comparing two
_LONGEST = 500  # characters; no reference answer is longer, and a parser is not linear
_HUGE_POWER = re.compile(
    r"(\^|\*\*)\s*[\{\(]?\s*-?\d{4,}|(\^|\*\*)[^+\-=,]*(\^|\*\*)[^+\-=,]*(\^|\*\*)|\d{3,}\s*!|!\s*!"
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`) with balanced braces, or of `\boxed x`; else None."""
    starts = list(re.finditer(r"\\(?:boxed|fbox)\s*(\{| )", text))
    if not starts:
        return None
    start = starts[-1]
    if start.group(1) == " ":
        rest = text[start.end() :].split("$")[0].split()
        return rest[0] if rest else None
    depth = 1
    for place in range(start.end(), len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[start.end() : place].strip()
    return None


def normalize(answer: str) -> str:
    r"""An answer without parts that carry no meaning: spaces, `$`, `\left`, units, thousands commas, `x =`."""
    text = answer.strip().strip("$").strip()
    text = re.sub(r"^[A-Za-z]\s*=\s*(?=.)", "", text)
    text = text.replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("\\,", "").replace("\\;", "")
    text = (
        text.replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
        .replace("\\$", "")
        .replace("\\%", "")
        .replace("%", "")
    )
    text = (
        re.sub(
            r"\\(?:text|mbox|textbf|mathrm)\{\s*(?:[a-z]+\.?|square [a-z]+|[a-z]+\s*\^\s*\d)\s*\}(?:\^\{?\d\}?)?$",
            "",
            text,
        )
        or text
    )
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\s*\{?\\circ\}?", "", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    return re.sub(r"(?<=\d)\.0+$", "", text)


def same_answer(answer: str, reference: str) -> bool:
    """Whether an answer equals the reference: as text after `normalize`, or else as mathematics by math-verify.

    An answer that cannot be parsed, takes several seconds, or would compute an astronomic number is not equal. The time
    limits use a signal, which needs the main thread; processes of the reward pool always score there. In other threads
    only the length and size limits hold.
    """
    ours, theirs = normalize(answer), normalize(reference)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    if max(len(answer), len(reference)) > _LONGEST or _HUGE_POWER.search(answer):
        return False
    return _verify(answer.strip().strip("$"), reference.strip().strip("$"))


@functools.lru_cache(maxsize=4096)
def _verify(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # An answer that does not parse is wrong, which is not worth a warning.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    limit = _LIMIT_S if threading.current_thread() is threading.main_thread() else None
    configs = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    gold = parse(f"\\boxed{{{reference}}}", configs, parsing_timeout=limit)
    found = parse(f"\\boxed{{{answer}}}", configs, parsing_timeout=limit)
    return bool(gold and found and verify(gold, found, timeout_seconds=limit))
