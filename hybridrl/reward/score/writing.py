r"""The writing of answers: signs of other keyboards and languages in those of plain text and of LaTeX."""

import re
import unicodedata

from hybridrl.utils.end_tokens import without_ends

#: words that multiply a number
SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SIGNS = _FULL_WIDTH | {
    0x2212: "-",  # minus
    0xFE63: "-",
    0x2010: "-",
    0x2011: "-",
    0x00D7: r"\times ",
    0x00B7: r"\cdot ",
    0x22C5: r"\cdot ",
    0x00F7: "/",
    0x2044: "/",
    0x2215: "/",
    0x00B0: r"^\circ",
    0x03C0: r"\pi ",
    0x221E: r"\infty ",
    0x222A: r"\cup ",
    0x2248: r"\approx ",
    0x00A0: " ",
    0x2009: " ",
    0x202F: " ",
}
#: what mathematics without LaTeX is written with; not in `_SIGNS`, since a grader of plain numbers would see a 2 in m^2
_WRITTEN = {
    0x2260: r"\neq ",
    0x2264: r"\le ",
    0x2265: r"\ge ",
    0x20AC: "",
    0x00A3: "",
    0x20B9: "",
    0x2205: r"\emptyset ",
}
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
#: powers with a sign or in parentheses
_POWER = re.compile(r"\^\s*(?:([+-]\d+)|\(\s*([+-]?\d+)\s*\))")
_TENS = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_ROOT = re.compile(r"\u221a\s*(?:(\d+|[A-Za-z])|\(([^()]*)\))")
_WHOLE_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}")
_DASH = re.compile(r"(?<![\w)\]}])[\u2012\u2013\u2014](?=\s*[\d.\\(A-Za-z])")
#: marks between thousands, and decimals behind a comma, where nothing else can be meant
_APOSTROPHES = re.compile(r"(?<![\d.,])\d{1,3}(?:['\u2019_]\d{3})+(?!\d)")
_DOTS = re.compile(r"(?<![\d.,])(?:\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}(?:\.\d{3})+,\d+)(?![\d.,]*\d)")
#: an answer said in a sentence, or without claim to be exact
_SAID = re.compile(
    r"(?i)^(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is|=|:)\s*:?\s*|(?:about|approximately|approx\.?|roughly|exactly)\s+"
    r"|\\approx\s*|~\s*|(?:usd|eur|gbp|us(?=\$))\s*(?=[\d$]))+"
)
_DELIMITERS = re.compile(r"^\\\((?P<inner>.*)\\\)$|^\\\[(?P<display>.*)\\\]$", re.DOTALL)


def signs(text: str) -> str:
    """Text with one character for each sign: a minus, digits of any script, a degree, a space; 1½ is 1 1/2."""
    if text.isascii():
        return text
    return _DASH.sub("-", "".join(map(_plain, text)).translate(_SIGNS)).strip(" ")


def _plain(character: str) -> str:
    if character.isascii():
        return character
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return character


def unify(text: str) -> str:
    r"""`signs` of an answer, its powers and roots in LaTeX, and without what says nothing.

    These are `$`, `**`, `\text{}` around all of it, tokens that end a turn, words such as "The answer is" and "about",
    marks between thousands, and punctuation behind it.
    """
    text = _ROOT.sub(r"\\sqrt{\1\2}", signs(powers(without_ends(text))).translate(_WRITTEN)).strip()
    text = _POWER.sub(lambda match: f"^{{{match[1] or match[2]}}}", _TENS.sub(r"\\times ", text))
    delimited = _DELIMITERS.match(text)
    text = text if delimited is None else (delimited["inner"] or delimited["display"] or "").strip()
    whole = _WHOLE_TEXT.fullmatch(text)
    text = text if whole is None else whole[1].strip()
    text = text.replace("\\$", "").replace("$", "").strip().strip("*").strip().rstrip(",;").rstrip()
    text = re.sub(r"(?:\\\\|(?<!\\)\\)\s*$", "", text)
    text = _SAID.sub("", text) or text
    text = text.replace("\\varnothing", "\\emptyset").replace("\\langle", "(").replace("\\rangle", ")")
    text = _APOSTROPHES.sub(lambda match: re.sub(r"['\u2019_]", "", match[0]), text)
    return _DOTS.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)


def powers(text: str, before: str = "") -> str:
    """Text with `^` and plain digits for raised ones.

    Args:
        before: a pattern that stands before these.
    """
    if text.isascii():
        return text
    return re.sub(f"{before}[{''.join(_RAISED)}]+", lambda match: _raised(match[0]), text)


def _raised(run: str) -> str:
    power = "".join(_RAISED[sign] for sign in run)
    return f"^{power}" if len(power) == 1 else f"^{{{power}}}"
