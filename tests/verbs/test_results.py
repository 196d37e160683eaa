"""A verb's result in Python: a line at a prompt, whole where it is printed, a picture and a table in a notebook."""

from html.parser import HTMLParser

import diffquant
from tests.support.checkpoints import write_checkpoint
from tests.support.tiny_lm import write_diff_v2


class Cells(HTMLParser):
    """The texts of a table's cells."""

    def __init__(self, html):
        super().__init__()
        self.texts, self._is_cell = [], False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._is_cell = tag in ("td", "th")

    def handle_endtag(self, tag):
        self._is_cell = False

    def handle_data(self, data):
        if self._is_cell:
            self.texts.append(data)


def test_a_result_is_a_line_at_a_prompt_and_whole_where_it_is_printed(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "a<b", "unilm-v1")
    done = diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "4:g32"})
    for result in (done, diffquant.inspect(checkpoint)):
        first, _, rest = str(result).partition("\n")
        assert rest
        assert repr(result) == f"<{type(result).__name__} {first}>"
    assert str(done) == done.summary()
    html = diffquant.inspect(checkpoint)._repr_html_()
    assert html.startswith("<pre>")
    assert "a&lt;b" in html


def test_a_sweep_shows_its_table_and_its_plot(tmp_path):
    model = write_diff_v2(tmp_path / "model")
    sweep = diffquant.sweep(model, tmp_path / "out", tasks="perplexity", bits=4, characters=400)
    assert "\n" not in repr(sweep)
    assert str(sweep) == sweep.table()
    assert "4:row" in sweep.table()
    texts = Cells(sweep._repr_html_()).texts
    assert {"4:row", "model"} <= set(texts)
    assert all(text in sweep.table() for text in texts)
    picture = sweep.plot(tmp_path / "plot.svg")
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / "plot.svg").read_text().lstrip().startswith("<?xml")
