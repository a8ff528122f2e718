"""Options in panels, and the names of arguments in error messages as the user typed them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

# Maps names of parameters in Python functions to the names of these arguments in the help.
ALIASES = {"path_or_hub_id": "MODEL"}


def option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    """Return an option of a command whose help has several panels.

    Args:
        panel: Title of the panel.
        text: Help of the option.
        names: Names of the option; without a name, typer derives it from the parameter.
        metavar: Name of the value in the help; None lets typer choose.
    """
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


def typed_text(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """Decode a text of the command line as UTF-8, even if the locale has no Unicode.

    Args:
        parameter: The parameter of the command.
        text: The text as Python decoded it, with surrogates for the bytes that the encoding of the
            locale cannot decode.

    Returns:
        The text, with its bytes decoded as UTF-8.

    Raises:
        ValueError: If the bytes are not UTF-8.
    """
    if text is None:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode()
        except UnicodeError as error:
            name = typed_names([parameter])[str(parameter.name)]
            raise ValueError(f"{name}: got {text!r}, allowed: text in UTF-8") from error
    return text


def typed_names(parameters: Sequence[Any]) -> dict[str, str]:
    """Map the Python name of each parameter of a command to the name that the user types.

    Args:
        parameters: The parameters of a click command.

    Returns:
        A dict from the Python name of each parameter to a name. The name is the longest spelling of
        an option, such as ``--batch-size``, or the name of an argument in the help, such as
        ``MODEL``.
    """
    names = dict(ALIASES)
    for parameter in parameters:
        spellings = [name for name in parameter.opts if name.startswith("--")]
        typed = max(spellings, key=len, default=parameter.metavar)
        if typed:
            names[parameter.name] = typed
    return names


def name_as_typed(message: str, names: Mapping[str, str]) -> str:
    """Replace the names of Python parameters in a message by the names that the user typed.

    A name is replaced at the start of the message if a colon follows the name, and at any place if
    a number in parentheses follows the name. A name with an underscore is replaced everywhere
    except in a path, a quotation or a longer name.

    Args:
        message: The message of an error.
        names: The result of `typed_names`.

    Returns:
        The message with the typed names.

    Examples:
        >>> from fastbert.cli.arguments import name_as_typed
        >>> name_as_typed("top_k: got -1, see out", {"top_k": "--top-k", "out": "OUT"})
        '--top-k: got -1, see out'
    """
    if not names:
        return message
    name = "(?:" + "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + ")"
    outside, after = r"(?<![\w./\\'\"=-])", r"(?![\w/\\'\"=-]|\.\w)"

    def typed(match: re.Match[str]) -> str:
        return re.sub(rf"\b{name}\b", lambda word: names[word[0]], match[0])

    message = re.sub(rf"^{name}(?:(?:, | and ){name})*(?=: )", typed, message)
    message = re.sub(rf"{outside}{name}(?= \([\d.]+(?:e[+-]?\d+)?\))", typed, message)
    return re.sub(rf"{outside}{name}{after}", lambda m: typed(m) if "_" in m[0] else m[0], message)
