"""Scripts run with the environment that the caller activated, where it has what they need."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from install import active_environment
from install.active_environment import ROOT, enter, unused_gpu


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def execv(_: Any, argv: list[str]) -> None:
        commands.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "argv", ["scripts/bench/losses", "--vocab", "8"])
    return commands


def test_an_environment_with_all_modules_stays(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/an/environment/for/cuda")
    assert enter("torch") == ROOT
    assert started == []


def test_one_without_a_module_gives_way_to_the_demos(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")
    with pytest.raises(SystemExit):
        enter("no_such_module")
    assert started == [[str(ROOT / ".venv/bin/python"), "scripts/bench/losses", "--vocab", "8"]]


def test_without_any_environment_the_error_says_what_to_do(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    with pytest.raises(SystemExit, match=r"has no no_such_module\. Activate the environment"):
        enter("no_such_module")
    assert started == []


def test_a_gpu_that_torch_does_not_use_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(active_environment, "_GPU_DRIVER", tmp_path / "none")
    assert unused_gpu() is None, "there is no GPU"
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(active_environment, "_GPU_DRIVER", tmp_path)
    assert "does not use it: activate the environment" in (unused_gpu() or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unused_gpu() is None
