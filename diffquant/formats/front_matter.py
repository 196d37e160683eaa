"""The front matter of model cards: what a source's says of licence and language, and a card made of it repeats.

Source: the Hugging Face hub's model cards, huggingface.co/docs/hub/model-cards.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffquant.support.yaml_text import parse_yaml

CARD = "README.md"
# What stays true of a model whose numbers are rounded or renamed; extra_gated_* ask readers to accept its terms.
_CARRIED = re.compile(
    "license|license_name|license_link|language|pipeline_tag|base_model|base_model_relation|datasets|extra_gated_.*"
)
_TEXT = re.compile(r"---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def read_front_matter(folder: Path) -> dict[str, Any]:
    """The front matter of a folder's card that goes along with the model; empty where there is none.

    A card that cannot be read may name any licence, so that its licence is the hub's "unknown". A snapshot of the hub
    is the base of what is made of it, whatever it was made from itself.
    """
    card = folder / CARD
    try:
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        found = _TEXT.match(text)
        entries = parse_yaml(found["yaml"]) if found else {}
        if not isinstance(entries, Mapping):
            raise ValueError("no mapping")
    except (OSError, ValueError):
        entries = {"license": "unknown"}
    carried = {key: value for key, value in entries.items() if isinstance(key, str) and _CARRIED.fullmatch(key)}
    carried = _without_odd_link(carried)
    if name := _hub_name(folder):
        carried = {key: value for key, value in carried.items() if key != "base_model_relation"} | {"base_model": name}
    return carried


def gguf_front_matter(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same, from a GGUF file's metadata."""
    keys = {
        "license": "general.license",
        "license_name": "general.license.name",
        "license_link": "general.license.link",
        "language": "general.languages",
    }
    stated = {key: metadata[theirs] for key, theirs in keys.items() if metadata.get(theirs)}
    # YAML has lists and no tuples.
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in stated.items()}
    _, hub, base = str(metadata.get("general.base_model.0.repo_url", "")).partition("//huggingface.co/")
    return _without_odd_link(stated | ({"base_model": base} if hub and base else {}))


def _without_odd_link(entries: dict[str, Any]) -> dict[str, Any]:
    """Front matter whose license_link, which pages make a link of, leads to a web page or a file of the repository."""
    link = entries.get("license_link")
    if link is None or (isinstance(link, str) and _is_web_link(link)):
        return entries
    return {key: value for key, value in entries.items() if key != "license_link"}


def _is_web_link(link: str) -> bool:
    # Browsers take a backslash for a slash, and skip spaces and control characters within a scheme.
    if "\\" in link or any(character <= " " for character in link):
        return False
    try:
        parts = urlsplit(link)
    except ValueError:
        return False
    if parts.scheme:
        return parts.scheme in ("http", "https") and bool(parts.netloc)
    return not parts.netloc and ":" not in link.partition("/")[0]


def front_matter(library: str, tags: Sequence[str], carried: Mapping[str, Any], relation: str | None = None) -> str:
    """A card's front matter with its lines of dashes.

    Args:
        library: what opens the folder, by the hub's name.
        carried: front matter of the source's card.
        relation: what the folder is to its base_model, where it is something else than its source was.
    """
    import yaml

    entries = {key: value for key, value in carried.items() if key != "base_model_relation" or relation is None}
    if relation and "base_model" in entries:
        entries["base_model_relation"] = relation
    entries = {"library_name": library, **entries, "tags": list(tags)}
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---\n"


def _hub_name(folder: Path) -> str | None:
    """ORG/NAME of a folder that Hugging Face's client fetched; None for any other."""
    place = folder.resolve()
    # Its cache has models--ORG--NAME/snapshots/COMMIT.
    kind, _, name = place.parent.parent.name.partition("--")
    return name.replace("--", "/", 1) if place.parent.name == "snapshots" and kind == "models" else None
