"""One reward a file, in reward.json."""

import json
from pathlib import Path


def test_total():
    found = Path("/app/out/total.txt").read_text().strip()
    assert found == "975", f"assert {found!r} == '975'"


def test_items():
    found = Path("/app/out/items.txt").read_text().split()
    assert found == ["bread", "cheese", "milk", "roll"], f"assert {found!r}"


rewards = {}
for test in (test_total, test_items):
    try:
        test()
        print(f"PASSED test_state.py::{test.__name__}")
        rewards[test.__name__] = 1
    except (AssertionError, OSError) as error:
        print(f"FAILED test_state.py::{test.__name__} - {error}")
        rewards[test.__name__] = 0
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))
