"""The images that a Dockerfile builds on."""

import time

import pytest

from agentic_opd_environments.harbor.dockerfile import base_images


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("FROM debian:12\nRUN true", ["debian:12"]),
        ("# comment\n\nfrom  --platform=$BUILDPLATFORM  debian@sha256:12  as  Base\nFROM base", ["debian@sha256:12"]),
        ("FROM a AS one\nFROM b AS two\nFROM c\nCOPY --from=one /a /a\n", ["c", "a"]),
        ("FROM a\nFROM b\nCOPY --chown=1:1 --from=0 /a /a", ["b", "a"]),
        ("FROM scratch\nCOPY --from=busybox:1 /bin/sh /bin/sh", ["busybox:1"]),
        ("FROM a\nRUN --mount=type=bind,from=tools,target=/t \\\n  # comment\n  /t/x", ["a", "tools"]),
        ("FROM unused AS x\nFROM a", ["a"]),
        ('ARG V=12\nARG NAME="debian:${V}"\nFROM $NAME', ["debian:12"]),
        ("ARG V\nFROM debian:${V:-13}", ["debian:13"]),
        ("ARG V\nFROM debian:${V}", []),
        ("FROM debian:\\\n12", ["debian:12"]),
        ("# escape=`\nFROM debian:`\n12", ["debian:12"]),
        ("FROM a\nRUN <<EOF\nFROM b\nEOF\nRUN cat <<-'END' <<OTHER\nFROM c\n\tEND\nFROM d\nOTHER\nRUN true", ["a"]),
        ("FROM a AS first\nRUN echo $((1 <<3)) <<< x\nFROM first", ["a"]),
        ("FROM debian AS debian\nFROM debian", ["debian"]),
        ("FROM \nFROM 'a", ["'a"]),
        ("", []),
    ],
)
def test_images_that_the_last_stage_needs(text: str, images: list[str]) -> None:
    assert base_images(text, {}) == images


def test_build_arguments_and_another_target() -> None:
    text = "ARG BASE=debian\nFROM ${BASE}:12 AS tools\nFROM ${BASE}-slim"
    assert base_images(text, {"BASE": "ubuntu"}) == ["ubuntu-slim"]
    assert base_images(text, {}, "TOOLS") == ["debian:12"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "ARG A=" + "${A-" * 50_000,
        "FROM a\nRUN " + "--mount=" * 50_000,
        "FROM a\nRUN " + " <<a" * 50_000 + "\n" * 50_000,
        "".join(f"FROM s{number} AS s{number + 1}\n" for number in range(20_000)),
        "FROM a\nRUN " + "\\\n" * 50_000,
        "FROM a\nRUN " + "<<'a" * 50_000,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_long_files_are_read_in_a_moment(text: str) -> None:
    start = time.process_time()
    base_images(text, {})
    assert time.process_time() - start < 10
