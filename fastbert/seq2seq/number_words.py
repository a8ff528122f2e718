"""English number words."""

from __future__ import annotations

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**6, "million"), (10**3, "thousand"))
LIMIT = 10**9


def number_words(number: int, *, joined: str = "-", middle: str = "and ") -> str:
    """Write a number in words.

    Args:
        number: The number, from 0 to 999,999,999.
        joined: Text between the tens and the ones, as in ``"forty-two"``.
        middle: Text before the tens and ones that follow larger units, as in ``"one hundred and
            two"``; an empty text gives ``"one hundred two"``.

    Returns:
        The words.

    Raises:
        ValueError: If the number is not in the range.

    Examples:
        >>> from fastbert.seq2seq.number_words import number_words
        >>> number_words(304012)
        'three hundred and four thousand and twelve'
        >>> number_words(304012, joined=" ", middle="")
        'three hundred four thousand twelve'
    """
    if not 0 <= number < LIMIT:
        raise ValueError(f"number: got {number}, allowed: an integer from 0 to {LIMIT - 1}")
    if number == 0:
        return ONES[0]
    parts = []
    for size, name in SCALES:
        count, number = divmod(number, size)
        if count:
            parts.append(f"{_below_thousand(count, joined, middle)} {name}")
    if number:
        before = middle if parts and number < 100 else ""
        parts.append(before + _below_thousand(number, joined, middle))
    return " ".join(parts)


def _below_thousand(number: int, joined: str, middle: str) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest, joined)
    return f"{ONES[hundreds]} hundred" + (
        f" {middle}{_below_hundred(rest, joined)}" if rest else ""
    )


def _below_hundred(number: int, joined: str) -> str:
    if number < len(ONES):
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (joined + ONES[ones] if ones else "")
