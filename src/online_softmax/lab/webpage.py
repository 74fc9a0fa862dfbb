"""A page that is one file: a template of web/ filled, with its data and a policy of its own.

Pages are made of files that anybody may have written. So data is JSON in which no `<` stands, and
the policy lets a page load nothing, and run no script but those of its template, each by its
digest: markup that got in all the same would be text that runs nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources

import online_softmax

POLICY = (
    "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
PLACE = re.compile(r"\{\{(\w+)\}\}")
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)  # of a template; data has a type


def source(name: str) -> str:
    """A file of lab/web/."""
    file = resources.files(online_softmax).joinpath("lab", "web", name)
    return file.read_text(encoding="utf-8").strip()


def embedded(value: object) -> str:
    """A value as JSON within a script element: no `<` in it, so nothing ends the element.

    >>> embedded("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def script(text: str) -> str:
    """JavaScript as it may stand in a script element, with the line ends that a browser makes.

    >>> script("'</script><!--'")
    "'<\\\\/script>\\\\x3c!--'"
    """
    text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace("<!--", "\\x3c!--")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A page.

    Args:
        template: a file of lab/web/, with {{names}}, {{policy}} and {{generator}} among them.
        parts: what stands in place of the others; HTML, CSS, `embedded` JSON or a `script`.
    """
    text, known = source(template), dict(parts)
    known["generator"] = f"online-softmax {online_softmax.__version__}"

    def fill(part: str) -> str:
        # In one pass, so that what is put in is not read for places to put something.
        return PLACE.sub(lambda found: known[found[1]], part)

    known["policy"] = POLICY.format(" ".join(_digest(fill(each)) for each in SCRIPT.findall(text)))
    # A half of a character, which JSON can have, is none in UTF-8.
    return fill(text).encode("utf-8", "replace").decode("utf-8")


def _digest(text: str) -> str:
    found = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(found).decode('ascii')}'"
