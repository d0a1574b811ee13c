"""What a class says of itself: its docstring as a summary and a line per attribute.

The configuration page and the OpenAPI document are made from these.
"""

from __future__ import annotations

import inspect
import re


def attribute_docs(struct_type: type) -> dict[str, str]:
    """Field name -> text, out of the `Attributes:` sections of a class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(struct_type.__mro__):
        found |= _attributes_of(owner.__dict__.get("__doc__") or "")
    return found


def _attributes_of(docstring: str) -> dict[str, str]:
    _, _, section = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        entry = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.strip():
            for name in names:
                found[name] += " " + line.strip()
    return found


def summary_of(documented: type) -> str:
    """The docstring without its sections, as one paragraph per paragraph."""
    text = inspect.cleandoc(documented.__doc__ or "").partition("\nAttributes:\n")[0]
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
