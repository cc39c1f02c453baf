"""The text: what is taken from markdown, and how it is cut into documents."""

import json
from pathlib import Path

import pytest

from minserve.model.tokenizer import ByteTokenizer
from minserve.quantize.prose import collect, documents, markdown_of, own_prose, prose_of

LONG = "A request holds its blocks in a table, and the block that is being filled is the last one of it, always."
MARKDOWN = f"""# A heading that is long enough to be taken for a paragraph by a careless reader of markdown text

{LONG}

```python
this = "a code block that is long enough to be taken for a paragraph by a careless reader of markdown"
```

| a table | that is long enough | to be taken for a paragraph | by a careless reader of markdown |

**한국어 요약** 요청마다 연속된 공간을 잡아 두면 KV 메모리의 20~60%에만 실제 토큰이 들어 있고, 나머지는 예약분입니다.

short

It **keeps** the words of [a link](https://example.org/page) and the code in `backticks`, over
two lines, as long as they are one paragraph.
"""


def test_only_english_paragraphs_are_kept() -> None:
    linked = "It keeps the words of a link and the code in `backticks`, over two lines, as long as they are one paragraph."
    assert prose_of(MARKDOWN) == [LONG, linked]


def test_a_notebook_gives_its_markdown_cells(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": [LONG[:20], LONG[20:]]}, {"cell_type": "code", "source": ["x = 1"]}]
    notebook, readme = tmp_path / "one.ipynb", tmp_path / "two.md"
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    readme.write_text(MARKDOWN, encoding="utf-8")
    assert markdown_of(notebook) == LONG
    text = collect([notebook, readme])
    assert text.startswith(f"=== one.ipynb\n\n{LONG}\n\n=== two.md\n\n{LONG}\n\nIt keeps")


def test_documents_are_equally_long_and_never_cross_sources() -> None:
    text = f"=== a\n\n{'a' * 100}\n\n=== b\n\n{'b' * 70}\n"
    found = documents(ByteTokenizer(), 5, 32, text)
    assert found == [[ord("a")] * 32] * 3 + [[ord("b")] * 32] * 2
    assert documents(ByteTokenizer(), 2, 32, text) == [[ord("a")] * 32] * 2  # 0 and 2 of 5
    with pytest.raises(ValueError, match="the text gives 5 documents of 32 tokens, 6 were asked for"):
        documents(ByteTokenizer(), 6, 32, text)


def test_the_packages_own_text_is_what_the_function_makes() -> None:
    text = own_prose()
    paragraphs = [block for block in text.split("\n\n") if not block.startswith("===")]
    assert 300 < len(paragraphs) and text.count("=== ") == 9
    assert [p.strip() for p in paragraphs] == prose_of("\n\n".join(paragraphs))
    assert len(documents(ByteTokenizer(), 400, 256)) == 400
