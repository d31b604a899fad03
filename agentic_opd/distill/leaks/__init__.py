"""Detection of hidden test data in hints. Pure.

    hidden tests --hidden_data--> numbers, strings, containers, checks (the inputs of one test with its result)
    hint, public text --reading--> data in each text; a hint leaks data that are missing from the public text
    hint, hidden tests, public text --pieces--> numbers and unusual words of the tests' longer strings
    hint, hidden tests, public text --quotations--> verbatim token runs of the tests

Data are recognised in code and in words: `[[1, 3], [3, 5]]` is also "1 to 3 and 3 to 5", 98 is "ninety-eight", and
the check `f('') == True` is "an empty string should give True".
"""

import re

from agentic_opd.distill.leaks.pieces import tells_pieces
from agentic_opd.distill.leaks.quotations import quotes
from agentic_opd.distill.leaks.reading import tells


def leaks(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` gives away data of the hidden tests that `public_text` does not show.

    A hint leaks if it contains one of the following and the public text, parsed in the same way, does not:

    - a quotation: an asserted expression, or six consecutive code tokens with enough numbers and strings;
    - a number, string or container of the tests, in code or in words, reordered or reformatted. Exempt are None,
      booleans, one-digit integers, empty and one-character values, numbers that state a rule or count something
      (`n % 15`, "divisible by 15", `i + 10`, "26 letters"), and ordinary words without quotes;
    - two unusual words or numbers of one string, or one distinctive piece: "75.25" of a line of a table, "well-known";
    - the values of a container of four or more in order, in any layout: a table, a drawing;
    - the whole hidden text, if it is no longer than the hint: the answer itself, in a world without tests;
    - all values of a check (inputs and result) in one or two consecutive sentences, even if they are trivial or
      described: "for 0 it must return FizzBuzz". For a check with an empty input, that input and the result suffice.

    If the tests exceed 200,000 characters, token runs are compared in full, but values and calls only in the first
    part.

    Args:
        hint: The judge's hint.
        hidden_tests: Source of the hidden tests. If it is not Python, only numbers, strings and token runs count.
        public_text: All text that the agent read or wrote.
    """
    texts = (hint, hidden_tests, public_text)
    return _says_all(*texts) or quotes(*texts) or tells(*texts) or tells_pieces(*texts)


def _says_all(hint: str, hidden_text: str, public_text: str) -> bool:
    if len(hidden_text.strip()) > len(hint):
        return False
    whole = re.compile(rf"(?<!\w){re.escape(_plain(hidden_text))}(?!\w)")
    return bool(whole.search(_plain(hint))) and not whole.search(_plain(public_text))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
