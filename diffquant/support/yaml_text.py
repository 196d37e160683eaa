"""Reads YAML safely: without aliases, duplicate keys, base-60 numbers and deep nesting."""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from diffquant.support.names import find_duplicates, first_few

_DEEPEST = 50
_INTEGER = "tag:yaml.org,2002:int"


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without aliases, keys given twice, numbers in base 60, and deep nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            # A few lines of aliases can expand to more than memory holds.
            raise ConstructorError(None, None, "aliases (*name) are not supported", self.peek_event().start_mark)
        if self._depth == _DEEPEST:
            raise ConstructorError(None, None, "it is nested too deeply", self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, ScalarNode)]
        if twice := find_duplicates(names):
            listed = first_few(map(repr, sorted(twice)), ", ")
            raise ConstructorError(None, None, f"{listed} given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != _INTEGER]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 4:30 as 270, but here it is a mistyped scheme.
_PlainLoader.add_implicit_resolver(_INTEGER, re.compile(r"[-+]?[0-9]{1,18}$"), list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """Parse YAML into plain data.

    Raises:
        ValueError: the text is not YAML, has aliases or duplicate keys, or is nested too deeply.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        # In one line, without the parser's picture of the place.
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{place}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
