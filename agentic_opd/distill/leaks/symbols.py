"""Names of symbols -> the symbols: "a full stop and a comma" -> "'.,'", "an opening round bracket" -> "'('"."""

import re

_SIGNS = {
    **{"full stop": ".", "period": ".", "dot": ".", "comma": ",", "semicolon": ";", "colon": ":", "hyphen": "-"},
    **{"exclamation mark": "!", "question mark": "?", "hash": "#", "underscore": "_", "slash": "/", "asterisk": "*"},
}
_BRACKETS = {"round": "()", "paren": "()", "square": "[]", "curly": "{}", "brace": "{}"}
_NAME = (
    rf"(?:{'|'.join(_SIGNS)}|(?:(?:opening|open|left|closing|close|right|round|square|curly)\s){{1,2}}"
    r"(?:bracket|parenthesis|paren|brace|one))\b"
)
_NAMES = re.compile(rf"\b(?:an?\s)?{_NAME}(?:(?:,|,?\s(?:and|then|followed\sby)){{1,2}}\s(?:an?\s)?{_NAME})*", re.I)
_ONE_NAME = re.compile(_NAME, re.I)


def in_symbols(text: str) -> str:
    """Replace names of symbols by the quoted symbols; a single sign, or a bracket without a kind, stays a name."""
    return _NAMES.sub(_symbols, text)


def _symbols(match: re.Match[str]) -> str:
    symbols, pair = "", ""
    for name in _ONE_NAME.findall(match.group().lower()):
        pair = next((pair for kind, pair in _BRACKETS.items() if kind in name), pair)
        if name not in _SIGNS and not pair:
            return match.group()
        symbols += _SIGNS.get(name) or pair[name.startswith(("clos", "right")) or " clos" in name]
    return f"'{symbols}'" if pair or len(symbols) > 1 else match.group()
