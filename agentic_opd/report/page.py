"""`Run` -> one HTML file: the template with the project's CSS and JS and the packed data in it (I/O).

The page holds no markup but the template's: data are JSON in inert script elements, with `<`, `>` and `&` escaped, and
the JS makes text nodes of them. A content security policy forbids everything but the page's own script and style.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import ConfigError, OutputError
from agentic_opd.report.payload import Packer, head
from agentic_opd.report.rollouts import Run
from agentic_opd.report.tokens import TokenTexts, load_tokenizer

_SCRIPTS = (
    "text.js",
    "data.js",
    "dom.js",
    "charts.js",
    "overview.js",
    "list.js",
    "tokens.js",
    "detail.js",
    "rollout.js",
)
_MAIN = "main.js"


def choose_tokenizer(run: Run, name: str | None) -> tuple[Any | None, list[str]]:
    """Load the tokenizer `name`, or else the run's own; and what to tell the reader where there is none.

    Raises:
        ConfigError: `name` can't be loaded.
    """
    if name is not None:
        return load_tokenizer(name), []
    own = next((run.settings[key] for key in ("tokenizer_name", "policy_model") if run.settings.get(key)), None)
    if not isinstance(own, str):
        why = "no settings (.run.json) lie beside the file"
    else:
        try:
            return load_tokenizer(own), []
        except ConfigError as error:
            why = str(error)
    return None, [f"Tokens are shown as ids: {why}. Name a tokenizer with --tokenizer."]


def write_report(
    run: Run,
    path: Path,
    tokenizer: Any | None,
    notes: Sequence[str] = (),
    packed: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the report of `run` to `path`, whole or not at all, and return its size in bytes.

    Args:
        run: What to show.
        path: The HTML file; one that is there is replaced.
        tokenizer: A tokenizer of transformers, or None to show ids.
        notes: Sentences for the top of the overview.
        packed: Told how many rollouts are packed, after each.

    Raises:
        OutputError: it can't be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("w", encoding="utf-8") as file:
                file.writelines(_page(run, TokenTexts(tokenizer), notes, packed))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path.stat().st_size
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _page(run: Run, texts: TokenTexts, notes: Sequence[str], packed: Callable[[int], None]) -> Iterator[str]:
    """The file piece by piece. The blocks come before the head, whose vocabulary they fill."""
    style = _static("report.css")
    script = "(() => {\n'use strict';\n" + "".join(map(_static, (*_SCRIPTS, _MAIN))) + "})();\n"
    template = _static("template.html")
    for name, text in (("STYLE", style), ("STYLE_HASH", _hash(style)), ("SCRIPT_HASH", _hash(script))):
        template = template.replace(f"%{name}%", text)
    before, rest = template.split("%DATA%")
    between, after = rest.split("%SCRIPT%")
    yield before
    packer = Packer(texts)
    for index, rollout in enumerate(run.rollouts):
        yield f'<script type="text/plain" id="rollout-{index}">{packer.block(rollout)}</script>\n'
        packed(index + 1)
    yield f'<script type="application/json" id="head">{_inert(head(run, texts, packer, notes))}</script>\n'
    yield from (between, script, after)


def _inert(data: Any) -> str:
    """JSON that no HTML parser finds an end tag, a comment or an entity in. All but ASCII is escaped already."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _static(name: str) -> str:
    return (resources.files("agentic_opd.report") / "static" / name).read_text(encoding="utf-8")
