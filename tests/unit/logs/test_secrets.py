"""What looks like a key is masked, and what does not is left as it is."""

import json
import string
from random import Random

import pytest

from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.secrets import mask_secrets


def made_up(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    """Return a text of random characters, with a digit and a letter among them."""
    random = Random(length + len(letters))
    return (
        "a1" + "".join(random.choices(letters, k=length - 2))
        if "a" in letters
        else "A1" + "".join(random.choices(letters, k=length - 2))
    )


HEX = string.digits + "abcdef"
UPPER = string.ascii_uppercase + string.digits
VENDORS = {
    "sk-ant-api03-": made_up(93),
    "sk-proj-": made_up(48) + "_" + made_up(20),
    "sk-or-v1-": made_up(64, HEX),
    "sk-": made_up(48),
    "sk_live_": made_up(24),
    "rk_test_": made_up(24),
    "whsec_": made_up(32),
    "ghp_": made_up(36),
    "github_pat_": made_up(22) + "_" + made_up(59),
    "glpat-": made_up(20),
    "hf_": made_up(34),
    "r8_": made_up(37),
    "gsk_": made_up(52),
    "xai-": made_up(80),
    "pplx-": made_up(48),
    "nvapi-": made_up(64),
    "AIza": made_up(35),
    "GOCSPX-": made_up(28),
    "ya29.": made_up(60),
    "xoxb-": f"123456789012-123456789012-{made_up(24)}",
    "xapp-": f"1-{made_up(11, UPPER)}-123456789012-{made_up(64, HEX)}",
    "npm_": made_up(36),
    "pypi-": "AgEIcHlwaS5vcmc" + made_up(80),
    "dckr_pat_": made_up(27),
    "dop_v1_": made_up(64, HEX),
    "hvs.": made_up(24),
    "lin_api_": made_up(40),
    "dapi": made_up(32, HEX),
    "SG.": f"{made_up(22)}.{made_up(43)}",
    "AKIA": made_up(16, UPPER),
    "ASIA": made_up(16, UPPER),
    "123456789:AA": made_up(33),
}
"""Prefix -> the rest of a key."""


@pytest.mark.parametrize("prefix", VENDORS)
def test_a_vendors_key_becomes_its_prefix_and_stars(prefix: str) -> None:
    key = prefix + VENDORS[prefix]
    for text, masked in (
        (key, f"{prefix}***"),
        (f"export KEY='{key}'; run", f"export KEY='{prefix}***'; run"),
        (json.dumps({"key": key}), json.dumps({"key": f"{prefix}***"})),
        (f"a {key}\nb {key}.", f"a {prefix}***\nb {prefix}***"),
    ):
        read, number = mask_secrets(text)
        assert read.removesuffix(".") == masked
        assert number == text.count(key)
        assert mask_secrets(read) == (read, 0)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"Authorization: Bearer {made_up(40)}", "Authorization: Bearer ***"),
        (f'"authorization": "Basic {made_up(24)}=="', '"authorization": "Basic ***"'),
        (f"x-api-key: {made_up(32, HEX)}", "x-api-key: ***"),
        (f"AWS_SECRET_ACCESS_KEY={made_up(40)}", "AWS_SECRET_ACCESS_KEY=***"),
        (f'api_key = "{made_up(32)}"', 'api_key = "***"'),
        (f'{{\\"client_secret\\": \\"{made_up(40)}\\"}}', '{\\"client_secret\\": \\"***\\"}'),
        ("DB_PASSWORD=hunter22x", "DB_PASSWORD=***"),
        ("postgres://user:correct-horse@db/x", "postgres://user:***@db/x"),
        (f"eyJ{made_up(20)}.eyJ{made_up(30)}.{made_up(43)}", "eyJ***"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
        (
            f"https://hooks.slack.com/services/T00000000/B00000000/{made_up(24)}",
            "https://hooks.slack.com/services/***",
        ),
    ],
)
def test_a_secret_is_recognised_by_its_place(text: str, masked: str) -> None:
    assert mask_secrets(text) == (masked, 1)
    assert mask_secrets(masked) == (masked, 0)


@pytest.mark.parametrize(
    "text",
    [
        made_up(40, HEX),
        made_up(64, HEX),
        f"commit {made_up(40, HEX)}",
        "550e8400-e29b-41d4-a716-446655440000",
        f"sha256:{made_up(64, HEX)}",
        f"integrity: sha512-{made_up(86)}==",
        f"data:image/png;base64,{made_up(400)}",
        "toolu_017qEkVzzPb7b7o4FkgJLF23 call_PbWErNIge3YTrli3fiVvmIid msg_01XFDUDYJgAACzvnptvVoYEL",
        "max_tokens=4096, token_type: bearer, total_tokens: 123",
        "export OPENAI_API_KEY=$OPENAI_API_KEY",
        "api_key=os.environ['OPENAI_API_KEY2']",
        "OPENAI_API_KEY=<your-api-key-1234567890>",
        "ANTHROPIC_API_KEY=sk-ant-...",
        "pip install sk-learn-contrib-extensions-2024 hf_transfer_v2_0_1",
        "npm_config_registry_2024=x hf_hub_download_function1 gsk_tests",
        "password: str | None = None; password = getpass()",
        "secret_key = get_random_secret_key()",
        "git@github.com:me/repo.git http://localhost:8000/v1",
        "the token of the session, the key of the door: 12 steps",
    ],
)
def test_what_is_no_secret_is_left_as_it_is(text: str) -> None:
    assert mask_secrets(text) == (text, 0)


KEY = f"sk-{made_up(48)}"


def test_secrets_are_masked_everywhere_in_a_conversation_and_such_answers_are_not_learned() -> None:
    call = {"id": "1", "function": {"name": "bash", "arguments": {"command": f"curl -H '{KEY}'"}}}
    row = {
        "messages": [
            {"role": "system", "content": f"Key: {KEY}"},
            {"role": "user", "content": "Go.", "note": {"deep": [KEY]}},
            {"role": "assistant", "content": "", "reasoning_content": f"{KEY}?", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": f"{KEY} {KEY}"},
            {"role": "assistant", "content": "Done."},
        ]
    }
    log = read_log(row, ())
    assert KEY not in json.dumps(log.messages)
    assert json.loads(log.messages[2]["tool_calls"][0]["function"]["arguments"]) == {"command": "curl -H 'sk-***'"}
    assert log.notes[LogNote.MASKED] == 6
    assert log.context == {2: LogNote.SECRET}
    kept = read_log(row, (), mask_secrets=False)
    assert json.dumps(kept.messages).count(KEY) == 6
    assert not kept.context
    assert not +kept.notes
