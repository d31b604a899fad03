"""Secrets in text -> the same text with the secrets masked. Pure.

A secret is recognised by the form of its vendor (`sk-ant-api03-...`), by its place (`Authorization: Bearer ...`,
`https://user:password@host`, a private key's block), or by the name that it is assigned to (`API_KEY=...`). The mask
keeps the text's form: the prefix of the vendor, or the name, and `***`. Hashes, UUIDs, ids of commits and placeholders
such as `$API_KEY` and `<your key>` are no secrets.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentic_opd.core.types import Message

MASK = "***"

_VENDORS = (
    *(
        r"sk-ant-[a-z]+\d{2}-",
        r"sk-or-v1-",
        r"sk-(?:proj|svcacct|admin|lf)-",
        r"[sprk]k_(?:live|test|prod)_",
        r"whsec_",
    ),
    *(r"gh[opsur]_", r"github_pat_", r"gl(?:pat|dt|rt|ptt|cbt|soat|agent)-", r"xai-", r"pplx-", r"tvly-", r"nvapi-"),
    *(r"AIza", r"GOCSPX-", r"ya29\.", r"xox[abeoprs]-", r"xapp-", r"dckr_pat_", r"dop_v1_", r"hvs\.", r"tskey-"),
    *(r"lin_api_", r"lsv2_[ps][tk]_", r"sntry[su]_", r"shp(?:at|ca|pa|ss)_", r"glsa_", r"SG\.", r"AGE-SECRET-KEY-"),
)
"""Prefixes of keys; at least 16 characters follow, with digits and letters among them."""
_SHORT = (
    r"sk-",
    r"csk-",
    r"hf_",
    r"r8_",
    r"gsk_",
    r"fw_",
    r"npm_",
    r"pypi-",
    r"ntn_",
    r"sbp_",
    r"dapi",
    r"phx_",
    r"rnd_",
)
"""Prefixes that also begin words; 16 letters and digits in a row follow."""
_VENDOR_KEY = re.compile(rf"(?<![A-Za-z0-9_-])({'|'.join(_VENDORS)})([A-Za-z0-9_.-]+)")
_SHORT_KEY = re.compile(rf"(?<![A-Za-z0-9_-])({'|'.join(_SHORT)})([A-Za-z0-9]{{16,}})(?:[_-][A-Za-z0-9_-]*)?")
_AWS_KEY = re.compile(r"(?<![A-Za-z0-9])(A[KS]IA)([A-Z0-9]{16})(?![A-Za-z0-9])")
_TELEGRAM_KEY = re.compile(r"(?<![A-Za-z0-9_])([0-9]{8,10}:AA)([A-Za-z0-9_-]{33})(?![A-Za-z0-9_-])")
_WEB_TOKEN = re.compile(r"(?<![A-Za-z0-9_.-])(eyJ)[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+")
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----)[^-]+(-----END [A-Z ]{0,30}PRIVATE KEY)"
)
_HOOK = re.compile(r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)([A-Za-z0-9_/-]{20,})")
_HEADER = re.compile(r"(?i)(\bauthorization[\"']?:[ \t]?[\"']?(?:bearer|basic|token)[ \t])([A-Za-z0-9+/_.=~-]{12,})")
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^\s/:@\"'<>\\]{1,64}):([^\s/:@\"'<>\\${}*]{3,256})@")
_ASSIGNED = re.compile(
    r"([kK][eE][yY](?:_[iI][dD])?|[sS][eE][cC][rR][eE][tT]|[tT][oO][kK][eE][nN]|[pP][aA][sS][sS](?:[wW][oO][rR])?[dD]|"
    r"[pP][aA][sS][sS][wW][dD]|[pP][aA][sS][sS][pP][hH][rR][aA][sS][eE])"
    r"(\\?[\"']?[ \t]{0,3}(?:=>|[:=])[ \t]{0,3}\\?[\"']?)([^\s\"'`,;\\<>(){}\[\]$&|]+)"
)
_BEFORE = {
    "key": ("api", "access", "secret", "private", "auth", "signing", "encryption", "account"),
    "secret": ("client", "_", "-"),
    "token": ("access", "auth", "bearer", "refresh", "session", "api", "bot", "id", "_", "-"),
}
"""Last word of a name -> the words before it in names of secrets; a password's name needs none."""
_DIGIT, _LETTER = re.compile("[0-9]"), re.compile("[A-Za-z]")
_PLACEHOLDERS = ("your", "example", "placeholder", "changeme", "xxx", "...", MASK, "redacted", "dummy")


def mask_secrets(text: str) -> tuple[str, int]:
    """Return a text with its secrets masked, and their number. A masked text stays as it is."""
    number = 0
    for pattern, mask in _MASKS:

        def replaced(match: re.Match[str], mask: Callable[[re.Match[str]], str | None] = mask) -> str:
            nonlocal number
            masked = mask(match)
            number += masked is not None
            return match[0] if masked is None else masked

        text = pattern.sub(replaced, text)
    return text, number


# Each returns the masked text of a match, None if it is not a secret.


def _key(match: re.Match[str]) -> str | None:
    return f"{match[1]}{MASK}" if _is_random(match[2], 16) else None


def _header(match: re.Match[str]) -> str | None:
    return f"{match[1]}{MASK}" if _is_random(match[2], 12) else None


def _web_token(match: re.Match[str]) -> str:
    return f"{match[1]}{MASK}"


def _block(match: re.Match[str]) -> str | None:
    return None if MASK in match[0] else f"{match[1]}{MASK}{match[2]}"


def _password_in_url(match: re.Match[str]) -> str | None:
    return None if _is_placeholder(match[2]) else f"{match[1]}:{MASK}@"


def _assigned(match: re.Match[str]) -> str | None:
    word = match[1].lower().removesuffix("_id")
    before = match.string[max(0, match.start() - 12) : match.start()].lower()
    before = before.removesuffix("_").removesuffix("-") if word == "key" else before
    is_password = word.startswith("pass")
    if not is_password and not before.endswith(_BEFORE[word]):
        return None
    return f"{match[1]}{match[2]}{MASK}" if _is_random(match[3], 8 if is_password else 16) else None


_MASKS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str | None]], ...] = (
    (_PRIVATE_KEY, _block),
    (_WEB_TOKEN, _web_token),
    (_VENDOR_KEY, _key),
    (_SHORT_KEY, _key),
    (_AWS_KEY, _key),
    (_TELEGRAM_KEY, _key),
    (_HOOK, _key),
    (_HEADER, _header),
    (_PASSWORD_IN_URL, _password_in_url),
    (_ASSIGNED, _assigned),
)


def _is_random(secret: str, shortest: int) -> bool:
    """Return whether a text may be a secret: of at least `shortest` characters, with digits and letters."""
    is_mixed = _DIGIT.search(secret) is not None and _LETTER.search(secret) is not None
    return len(secret) >= shortest and is_mixed and not _is_placeholder(secret)


def _is_placeholder(secret: str) -> bool:
    """Return whether a text stands for a secret, or says where one is: `your-key`, `os.environ`, a path."""
    lower = secret.lower()
    names_place = lower.startswith(("/", "http", "os.", "process.", "self.", "config.", "settings."))
    return names_place or any(word in lower for word in _PLACEHOLDERS)


def masked_messages(messages: Sequence[Message]) -> tuple[list[Message], dict[int, int]]:
    """Return messages with their secrets masked, in texts, calls and all other fields, and by index the number of
    secrets that were masked in a message.
    """
    masked, numbers = list[Message](), dict[int, int]()
    for index, message in enumerate(messages):
        value, number = _masked(message)
        masked.append(cast(Message, value))
        if number:
            numbers[index] = number
    return masked, numbers


def _masked(value: Any) -> tuple[Any, int]:
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, Mapping):
        members = {key: _masked(member) for key, member in cast(Mapping[str, Any], value).items()}
        number = sum(number for _, number in members.values())
        return ({key: member for key, (member, _) in members.items()} if number else value), number
    if isinstance(value, list):
        elements = [_masked(member) for member in cast(list[Any], value)]
        number = sum(number for _, number in elements)
        return ([element for element, _ in elements] if number else value), number
    return value, 0
