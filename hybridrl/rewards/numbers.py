"""The number that a response ends on."""

import re
from fractions import Fraction

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\d))?"
# A minus after a digit, letter or bracket subtracts; elsewhere it is a sign.
_SIGN = r"(?:(?<![\w)\]}])[-+]\\?\$?)?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:\\[dt]?frac\s*{{\s*(?P<above>-?{_UNSIGNED})\s*}}\s*{{\s*(?P<below>-?{_UNSIGNED})\s*}}"
    rf"|(?P<number>{_UNSIGNED})(?:\s*/\s*(?P<divisor>{_UNSIGNED}))?)"
)
_ANSWER_LINE = re.compile(r"\banswer\s*:[\s*_]*([^\n]*)", re.IGNORECASE)
_MAX_DIGITS = 1000


def final_number_text(text: str) -> str | None:
    """The number that `text` gives as its answer, as plain text like -1234.5 or 3/4; None without one.

    Looked for in the last \\boxed{...}, else on the line of the last `Answer:`, else everywhere; the last number there
    counts. Thousands separators, signs, decimals, exponents and fractions (3/4, \\frac{3}{4}) are understood.
    """
    text = text.replace("−", "-").replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    found = list(_NUMBER.finditer(_answer_part(text)))
    if not found:
        return None
    last = found[-1]
    above, below = last["above"] or last["number"], last["below"] or last["divisor"]
    number = above if below is None else f"{above}/{below}"
    return (last["sign"].strip("\\$+") + number).replace("--", "").replace(",", "")


def final_number(text: str) -> Fraction | None:
    """`final_number_text` as an exact value; None without a number, beyond 1000 digits, or for a zero divisor."""
    number = final_number_text(text)
    if number is None or len(number) > _MAX_DIGITS:
        return None
    above, _, below = number.partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None


def _answer_part(text: str) -> str:
    boxed = text.rfind("\\boxed{")
    if boxed >= 0:
        return _braced(text[boxed + len("\\boxed{"):])
    marked = _ANSWER_LINE.findall(text)
    return marked[-1] if marked else text


def _braced(text: str) -> str:
    """`text` up to the brace that closes the one before it."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if not depth:
            return text[:i]
    return text
