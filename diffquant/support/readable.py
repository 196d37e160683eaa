"""Results that people look at: in a line at a prompt, whole where they are printed or end a notebook's cell."""

from html import escape


class Readable:
    """A result whose `str` is what the command prints; its `repr` is the first line of that."""

    def summary(self) -> str:
        """The result for people, in a few lines."""
        return str(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        """The text as a notebook shows it; where it has columns they stay aligned."""
        return f"<pre>{escape(str(self))}</pre>"
