"""No text can harm the output that it stands in, and none is lost."""

from __future__ import annotations

import pytest

from sdbench.base.escape import for_csv, for_markdown, for_terminal


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("H100 | 80GB", "H100 \\| 80GB"),
        ("one\ntwo\r\n\tthree", "one two three"),
        ("<script>alert(1)</script> & co", "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co"),
        ("[here](http://x) ![img](x)", "\\[here](http://x) !\\[img](x)"),
        ("a_b *c* `d` ~~e~~ # f $g$", "a\\_b \\*c\\* \\`d\\` \\~\\~e\\~\\~ \\# f \\$g\\$"),
        ("back\\slash \\| pipe", "back\\\\slash \\\\\\| pipe"),
        ("\u4e2d\u6587 \u00e9", "\u4e2d\u6587 \u00e9"),
        ("\x1b[31mred\x00", "?\\[31mred?"),
        (3.5, "3.5"),
    ],
)
def test_a_markdown_cell_is_one_line_of_plain_text(text, escaped):
    assert for_markdown(text) == escaped


@pytest.mark.parametrize("beginning", [*"=+-@", "\t", "\r", "\n", "\uff1d", "\uff0b"])
def test_no_csv_cell_begins_a_formula(beginning):
    cell = f"{beginning}cmd|' /C calc'!A0"
    assert for_csv(cell) == f"'{cell}"
    assert for_csv(for_csv(cell)) == for_csv(cell)


@pytest.mark.parametrize("value", [-1, -0.5, None, True, "H100", "a=b", "1-2", ""])
def test_numbers_and_other_texts_are_the_same_in_csv(value):
    assert for_csv(value) is value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[H wiped", "?[2J?[H wiped"),
        ("a\nb\tc\x07", "a b c?"),
        ("right\u202eleft", "right?left"),
        ("\u4e2d\u6587 stays", "\u4e2d\u6587 stays"),
        (12, "12"),
    ],
)
def test_a_terminal_gets_one_line_that_moves_no_cursor(text, shown):
    assert for_terminal(text) == shown
