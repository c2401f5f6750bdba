"""Comparison of mathematical answers, and their extraction from text."""

import functools
import logging
import math
import re
from decimal import Decimal
from fractions import Fraction

from hybridrl.reward.score.relations import in_order_of_names, interval_of, is_interval
from hybridrl.reward.score.work_limit import limited_work
from hybridrl.reward.score.writing import SCALES, unify

_LIMIT_S = 10.0  # seconds of processor time for parsing and comparing two expressions
_LONGEST = 500  # characters; no reference answer is longer, and a parser is not linear
_EXPONENT_DIGITS = 3  # more than these make a power astronomic
_HUGE_POWER = re.compile(
    r"(\^|\*\*)\s*[\{\(]?\s*-?\d{4,}|(\^|\*\*)[^+\-=,]*(\^|\*\*)[^+\-=,]*(\^|\*\*)|\d{3,}\s*!|!\s*!"
    r"|\([\d\s^{}+*.]*\^[\d\s^{}+*.]*(?:\\right)?\)\s*!|binom\s*\{\s*\d{4,}\s*\}\s*\{\s*\d{4,}"
)
#: an exponent that is a power of whole numbers
_TOWER = re.compile(r"(?:\^|\*\*)\s*[\{\(]*\s*(\d+)\s*(?:\^|\*\*)\s*[\{\(]*\s*(\d+)")

_PERCENT = re.compile(
    r"^(?P<value>.*?[\d})])\s*(?:\\?%|(?:\\(?:text|mbox|mathrm)\{\s*)?(?:percent|per cent)\}?)\s*\.?$"
)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")
_POWER_OF_TEN = re.compile(r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))\\(?:times|cdot)10\^\{?(?P<exponent>[+-]?\d{1,3})\}?")
#: digits below a bar repeat, and a single one below a dot
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>\d+)\.(?P<before>\d{0,50})\\(?:overline\{(?P<bar>\d{1,50})\}|dot\{(?P<dot>\d)\})"
)
_FRACTION = re.compile(r"(?P<sign>[+-]?)(?:\\frac\{)?(?P<top>\d{1,100})(?:\}\{|/)(?P<bottom>\d{1,100})\}?")
_MIXED = re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)")
_POWER = r"(?:\s*\^\s*\{?\d\}?)?"
_UNITS = re.compile(
    rf"(?P<value>.*[\d.}})])\s*(?:\\[ ,;]\s*|\s|(?=\\))+"
    rf"(?P<unit>(?:\\(?:text|mbox|textbf|mathrm|textrm)\{{\s*)?[A-Za-z]+(?:[ /]+[A-Za-z]+)*\.?{_POWER}\s*\}}?"
    rf"{_POWER})\s*"
)
#: words behind a number that are a part of it, or make the answer another one
_SIZES = re.compile(r"\d.*\b(?:hundred|thousand|million|billion|trillion|dozen|score|half|quarter|third|tenth)")
_WORDS = (
    "hundred thousand million billion trillion dozen score half quarter third tenth and or not to if else pi times "
    "plus minus over mod log ln sin cos tan cot sec csc exp sqrt max gcd lcm infinity th "
    "squared cubed factorial less more than fewer off below above choose remainder base root tens dozens hundreds "
    "thousands millions billions"
)
_NO_UNITS = frozenset(_WORDS.split())
#: words that are products of variables, not units: 3xy, 2ab, 4mn
_VARIABLES = re.compile(r"[abc]{2,3}|[xyz]{2,3}|[pqrst]{2}|mn|nm|st|uv|vw")
#: letters of several choices at once
_LETTERS = re.compile(r"A?B?C?D?E?F?G?H?I?J?")
#: of two answers with one word each of such a group, the words are the same, or the answers differ
_OPPOSITES = tuple(
    frozenset(group.split())
    for group in ("am pm noon midnight", "north south east west", "left right", "celsius fahrenheit kelvin")
)
#: the base that a number is written in
_BASE = re.compile(r"\d_\s*\{?\s*(\d+)\s*\}?$")
#: a number that a word multiplies
_SCALED = re.compile(
    rf"(?P<number>[+-]?(?:\d[\d,]*\.?\d*|\.\d+))(?:\s|\\[ ,;])*(?:\\(?:text|mbox|textbf|mathrm)\{{\s*)?"
    rf"(?P<scale>{'|'.join(SCALES)})s?\b(?P<unit>[^{{}}\d]*)\}}?"
)
#: a letter of several choices, by itself or before what it stands for
_CHOICE = re.compile(
    r"(?:\\(?:text|mbox|textbf|mathrm|mathbf)\{\s*)?(?:(?i:option|choice)\s+)?"
    r"(?:\((?P<enclosed>[A-Z])\)|(?P<marked>[A-Z])\s*[.):]|(?P<alone>[A-J])(?=\s*\}?$))\s*\}?"
    r"(?:\\[ ,;]|\s)*(?P<text>.*)",
    re.DOTALL,
)
_NEXT_CHOICE = re.compile(r"(?<![A-Za-z\\])(?:\([A-J]\)|[A-J][.):](?!\w))|\b(?:or|and)\s+\(?[A-J]\b")
#: relations; an answer without one is another
_RELATION = re.compile(r"\\(?:neq?|geq?|leq?|geqslant|leqslant|gt|lt)(?![A-Za-z])|[<>]")
#: feet and inches, minutes and seconds
_PRIMES = re.compile(r"\d\s*['\u2019\u2032]\s*\d")
#: names of one unit, for answers and references that both have one
_SAME_UNIT = {
    name: names.split()[0]
    for names in (
        "m meter meters metre metres",
        "cm centimeter centimeters centimetre centimetres",
        "mm millimeter millimeters millimetre millimetres",
        "km kilometer kilometers kilometre kilometres",
        "in inch inches",
        "ft foot feet",
        "yd yard yards",
        "mi mile miles",
        "g gram grams",
        "kg kilogram kilograms",
        "mg milligram milligrams",
        "lb lbs pound pounds",
        "oz ounce ounces",
        "s sec secs second seconds",
        "min mins minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "yr year years",
        "l liter liters litre litres",
        "ml milliliter milliliters millilitre millilitres",
        "dollar dollars usd",
        "cent cents",
        "euro euros",
        "degree degrees",
        "rad radian radians",
        "mph",
        "kph",
    )
    for name in names.split()
}


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
    text = re.sub(r"(?<!\d)(\d{1,3})((?: \d{3})+)(?!\d)", lambda m: m[1] + m[2].replace(" ", ""), unify(answer))
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
            r"\\(?:text|mbox|textbf|mathrm)\{\s*(?:([a-z]+)\.?|square [a-z]+|[a-z]+\s*\^\s*\d)\s*\}(?:\^\{?\d\}?)?$",
            lambda match: match[0] if match[1] in _NO_UNITS else "",
            text,
        )
        or text
    )
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\s*\{?\\circ\}?", "", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(log\s*_\s*\d)\s+(?=\d)", r"\1", text)  # a base, and what it is the logarithm of
    text = re.sub(r"(?<=\d)\s+(?=\d)", "~", text)  # two numbers, not one
    text = re.sub(r"\s+", "", text).rstrip(".")
    return re.sub(r"(?<=\d)\.0+$", "", text)


def same_answer(answer: str, reference: str) -> bool:
    """Whether an answer equals the reference: as text after `normalize`, or else as mathematics by math-verify.

    A percentage equals the number with and without the sign (50% is 50 and 0.5); of two percentages the numbers are
    compared. A unit behind a number counts only where both have a known one. An answer that cannot be parsed, or would
    compute an astronomic number, is not equal.

    Raises:
        UnscoredError: parsing and comparing took 10 s of processor time. This limit uses a signal, which needs the
            main thread; processes of the reward pool always score there. In other threads only the length and size
            limits hold.
    """
    ours, theirs = unify(answer), unify(reference)
    if max(len(ours), len(theirs)) > _LONGEST:
        return bool(ours) and normalize(ours) == normalize(theirs)
    return _same_choice(ours, theirs)


def _same_choice(ours: str, theirs: str) -> bool:
    """`same_answer` of unified texts: of two letters of choices these alone count, otherwise what they stand for."""
    letter, text = _choice(ours)
    expected, other = _choice(theirs)
    if letter and expected:
        return letter == expected
    if letter and text:
        return _same_text(text, theirs) or _same_text(ours, theirs)
    if expected and other:
        return _same_text(ours, other) or _same_text(ours, theirs)
    return _same_text(letter or ours, expected or theirs)


def _choice(text: str) -> tuple[str, str]:
    """The letter of a choice and the text behind it; empty where there is none."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return "", ""
    behind = match["text"].strip()
    if _NEXT_CHOICE.search(behind):
        return "", ""  # several choices
    if behind and re.match(r"[-+*/^=_]|\\(?:cdot|times|cup|cap|le|ge|in)\b", behind):
        return "", ""  # the beginning of a formula
    return match["enclosed"] or match["marked"] or match["alone"], behind


def _same_text(ours: str, theirs: str) -> bool:
    """`same_answer` of unified texts without letters of choices."""
    ours, theirs = _scaled(ours), _scaled(theirs)
    if bool(_SIZES.search(ours)) != bool(_SIZES.search(theirs)):
        return False
    percent, of_reference = _PERCENT.match(ours), _PERCENT.match(theirs)
    if (percent is None) == (of_reference is None):
        return _same_value(ours, theirs)
    if percent is not None:
        return any(_same_value(share, theirs) for share in _shares(percent["value"]))
    assert of_reference is not None
    return any(_same_value(ours, share) for share in _shares(of_reference["value"]))


def _shares(value: str) -> tuple[str, str]:
    """The values that a percentage may have without its sign: the number, and a hundredth of it."""
    return value, f"\\frac{{{value}}}{{100}}"


def _is_astronomic(answer: str) -> bool:
    """Whether an answer would compute a number of thousands of digits, which a computer algebra system writes out."""
    towers = ((int(base), int(exponent)) for base, exponent in _TOWER.findall(answer))
    is_huge = any(exponent * math.log10(max(base, 1)) >= _EXPONENT_DIGITS for base, exponent in towers)
    return is_huge or _HUGE_POWER.search(answer) is not None


def _same_value(answer: str, reference: str) -> bool:
    """`same_answer` of unified texts, percentages aside."""
    answer, reference = _same_writing(answer, reference)
    if _contradict(answer, reference):
        return False
    (answer, unit), (reference, other) = _with_unit(answer), _with_unit(reference)
    if unit and other and unit != other and {unit, other} <= set(_SAME_UNIT.values()):
        return False
    answer, reference = _improper(answer), _improper(reference)
    ours, theirs = normalize(answer), normalize(reference)
    if not ours or not theirs:
        return False
    if ours == theirs or _same_words(ours, theirs):
        return True
    if _differ_in_case(ours, theirs):
        return False
    values = _value_of(ours), _value_of(theirs)
    if None not in values and values[0] == values[1]:
        return True
    if max(ours.count(":"), theirs.count(":")) > 1:  # ratios of several numbers, whose order counts
        return False
    if ("~" in ours) != ("~" in theirs) or {_brackets(ours), _brackets(theirs)} == {"set", "ordered"}:
        return False
    if _is_astronomic(answer):
        return False
    return _verify(_written_out(answer), _written_out(reference))


def _value_of(text: str) -> Fraction | None:
    """The exact value of a number, of one with a power of ten, or of one with digits that repeat; None for others."""
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if (match := _POWER_OF_TEN.fullmatch(text)) is not None:
        return Fraction(match["number"]) * Fraction(10) ** int(match["exponent"])
    if (match := _REPEATING.fullmatch(text)) is not None:
        before, repeated = match["before"], match["bar"] or match["dot"]
        part = Fraction(int(repeated), 10 ** len(before) * (10 ** len(repeated) - 1))
        value = Fraction(int(match["whole"])) + Fraction(int(before or 0), 10 ** len(before)) + part
        return -value if match["sign"] == "-" else value
    if (match := _FRACTION.fullmatch(text)) is not None and int(match["bottom"]):
        return Fraction(int(match["sign"] + match["top"]), int(match["bottom"]))
    return None


def _same_writing(answer: str, reference: str) -> tuple[str, str]:
    """Both texts, where one is an interval or an ordered list, and the other describes one by names, in one form."""
    if _brackets(reference) == "ordered" and (values := in_order_of_names(answer)) is not None:
        return values, reference
    if _brackets(answer) == "ordered" and (values := in_order_of_names(reference)) is not None:
        return answer, values
    ours, theirs = interval_of(answer), interval_of(reference)
    if ours is not None and theirs is not None and ours[0] == theirs[0]:
        return ours[1], theirs[1]
    if ours is not None and is_interval(reference):
        return ours[1], reference
    if theirs is not None and is_interval(answer):
        return answer, theirs[1]
    return answer, reference


def _written_out(text: str) -> str:
    """A number such as `3e8` without its exponent, which is read as Euler's number otherwise."""
    return f"{Decimal(text):f}" if _NUMBER.fullmatch(text) else text


def _with_unit(text: str) -> tuple[str, str]:
    """A number without the unit behind it, and that unit by one of its names; the text itself where it has none."""
    match = _UNITS.fullmatch(text)
    if match is None:
        return text, "degree" if re.search(r"\^\s*\{?\\circ\}?$", text) else ""
    unit = re.sub(r"\\(?:text|mbox|textbf|mathrm|textrm)\{|[{}^\d.]", " ", match["unit"]).lower().split()
    if (
        not unit
        or _NO_UNITS & set(unit)
        or any(map(_is_product, unit))
        or not re.fullmatch(
            r"[+-]?[\d.,:/^ ]+|[+-]?[\d.]+\s*\\(?:times|cdot)\s*10\s*\^\s*\d+|.*[})]", match["value"].strip()
        )
    ):
        return text, ""
    name = " ".join(unit)
    name = _SAME_UNIT.get(name, name)
    if len(match["unit"].strip()) == 1:  # it may be a variable
        return text, name if name in _SAME_UNIT else ""
    return match["value"].strip(), name


def _scaled(text: str) -> str:
    """A number with the word million or the like behind it as one number, with its unit."""
    match = _SCALED.fullmatch(text)
    if match is None or _NO_UNITS & set(re.findall(r"[a-z]+", match["unit"].lower())):
        return text
    number = Decimal(match["number"].replace(",", "")) * SCALES[match["scale"]]
    return f"{number.normalize():f} {match['unit'].strip()}".strip()


def _is_product(word: str) -> bool:
    return _VARIABLES.fullmatch(word) is not None and word not in _SAME_UNIT


def _contradict(answer: str, reference: str) -> bool:
    """Whether both texts name a base, a power of a unit, or one of some opposites, and not the same one; whether one
    is a number, and the other a multiple of variables; and whether one alone has a relation, or feet and inches.
    """
    for mark in (_RELATION, _PRIMES):
        if (mark.search(answer) is None) != (mark.search(reference) is None):
            return True
    bases = [_BASE.search(text) for text in (answer, reference)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return True
    units = [_UNITS.fullmatch(text) for text in (answer, reference)]
    if units[0] is None or units[1] is None:
        return any(
            match is not None and _NUMBER.fullmatch(other) and any(map(_is_product, match["unit"].lower().split()))
            for match, other in zip(units, (reference, answer), strict=True)
        )
    powers = [re.findall(r"\^\s*\{?(\d)", match["unit"]) for match in units if match is not None]
    if all(powers) and powers[0] != powers[1]:
        return True
    words = [set(re.findall(r"[a-z]+", match["unit"].lower())) for match in units if match is not None]
    return any(words[0] & group and words[1] & group and words[0] & group != words[1] & group for group in _OPPOSITES)


def _improper(text: str) -> str:
    """A mixed number such as `1 1/2` as one fraction."""
    match = _MIXED.fullmatch(text.strip())
    if match is None:
        return text
    whole, top, bottom = (int(match[name]) for name in ("whole", "top", "bottom"))
    return f"{match['sign']}\\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _same_words(ours: str, theirs: str) -> bool:
    """Whether two words are the same but for capitals. So are letters of choices; other names of two letters differ."""
    if not ours.isalpha() or ours.lower() != theirs.lower():
        return False
    is_word = len(ours) > 2 or ours.lower() == "no"
    return _LETTERS.fullmatch(theirs) is not None or (is_word and not _is_product(ours))


def _differ_in_case(ours: str, theirs: str) -> bool:
    """Whether two names of letters are the same but for capitals, as `AB` and `ab` are."""
    return len(ours) > 1 and ours.isalpha() and ours != theirs and ours.lower() == theirs.lower()


def _brackets(text: str) -> str:
    """Whether a list is a set, by its braces, or ordered; empty for other texts."""
    if "," not in text:
        return ""
    return "set" if text.startswith("\\{") else "ordered" if text[0] in "([" and text[-1] in ")]" else ""


@functools.lru_cache(maxsize=4096)  # an expiry raises, so it is not remembered
def _verify(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # An answer that does not parse is wrong, which is not worth a warning.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    configs = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    with limited_work(_LIMIT_S, "comparing two answers by math-verify"):
        gold = parse(f"\\boxed{{{reference}}}", configs, parsing_timeout=None)
        match = parse(f"\\boxed{{{answer}}}", configs, parsing_timeout=None)
        return bool(gold and match and verify(gold, match, timeout_seconds=None))
