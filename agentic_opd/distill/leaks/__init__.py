"""Does a hint give hidden test data away? Pure.

    hidden tests --hidden_data--> numbers, strings, containers, checks (the inputs of one test with its result)
    hint, public text --reading--> which of them a text holds; a hint leaks what it holds and the public text does not
    hint, hidden tests, public text --pieces--> numbers and unusual words of the tests' longer strings
    hint, hidden tests --quotations--> the tests' own tokens, data or not

A datum is recognised in code and in words: `[[1, 3], [3, 5]]` is also "1 to 3 and 3 to 5", 98 is "ninety-eight", and
the check `f('') == True` is "an empty string should give True".
"""

import re

from agentic_opd.distill.leaks.pieces import tells_pieces
from agentic_opd.distill.leaks.quotations import quotes
from agentic_opd.distill.leaks.reading import tells


def leaks(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Tell whether `hint` gives away data of the hidden tests that `public_text` does not show.

    A hint leaks if it holds one of these, and the public text, read in the same way, does not:

    - a quotation: an asserted expression, or six code tokens in a row that hold enough of numbers and strings;
    - a number, string or container of the tests, in code or in words, reordered or reformatted. None, booleans,
      one-digit integers and empty or one-character values are trivial, and so are numbers that state a rule or count
      something (`n % 15`, "divisible by 15", `i + 10`, "26 letters") and strings that are ordinary words, unless they
      are quoted;
    - two unusual words or numbers of one string, or a telling one: "75.25" of a line of a table, "well-known";
    - the values of a container of four or more in their order, whatever stands between them: a table, a drawing;
    - all of the hidden text, where that is short: the answer itself, in a world without tests;
    - all the values of a check, its inputs and its result, in a sentence or two, be they trivial or described: "for 0
      it must return FizzBuzz". Of a check with an empty input that input and the result are enough.

    Of tests beyond 200,000 characters only runs of tokens are compared in all, and values and calls of the first part.

    Args:
        hint: The judge's hint.
        hidden_tests: Source of the hidden tests. If they are not Python, numbers, strings and runs of tokens count.
        public_text: Everything that the agent read or wrote.
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
