"""Text to measure a model on: the project's own prose, and how it was taken from the notebooks.

Why: perplexity needs text that the model has not seen, and that everyone who installs the package has. `prose.txt` holds the English
paragraphs of the notebooks and the README as they stood when it was made. It is a copy on purpose: were it read from the notebooks,
each edit of a sentence would change every recorded perplexity.

Invariant: the same tokenizer gives the same documents, all of the same length, spread evenly over the text.

Made by `python -m minserve.quantize.prose README.md notebooks/*.ipynb`. Taught in notebook 08.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from minserve.model.tokenizer import TextTokenizer

SECTION = "=== "  # begins the line that names a section's source
NOT_PROSE = ("#", "|", "<", "!", "```", "===")  # first characters of headings, tables, HTML, pictures, code
LEAST_CHARACTERS = 80  # shorter paragraphs are captions and labels


def prose_of(markdown: str) -> list[str]:
    """The paragraphs of a markdown text that are English prose, one line each, without markup of emphasis and links.

    >>> prose_of("A **block** holds [16](x.md) tokens, and a request holds as many blocks as it needs, of any number.")
    ['A block holds 16 tokens, and a request holds as many blocks as it needs, of any number.']
    """
    text = re.sub(r"```.*?```", "\n\n", markdown, flags=re.DOTALL)
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    plain = [_without_markup(block) for block in paragraphs if not block.startswith(NOT_PROSE)]
    return [block for block in plain if len(block) >= LEAST_CHARACTERS and _is_english(block)]


def _without_markup(block: str) -> str:
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)  # links keep their words
    return re.sub(r"\*\*|</?\w+[^>]*>", "", block).strip()


def _is_english(block: str) -> bool:
    return sum(c.isascii() and (c.isalpha() or c.isspace()) for c in block) > 0.8 * len(block)


def markdown_of(path: Path) -> str:
    """The text of a markdown file, or of a notebook's markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def collect(paths: Iterable[Path]) -> str:
    """All prose of these files as one text: a line for each source, then its paragraphs."""
    sections = [[f"{SECTION}{path.name}", *prose_of(markdown_of(path))] for path in paths]
    return "\n\n".join(line for section in sections for line in section) + "\n"


def own_prose() -> str:
    """The text that comes with the package."""
    return (resources.files("minserve") / "quantize" / "prose.txt").read_text(encoding="utf-8")


def documents(tokenizer: TextTokenizer, num_documents: int, num_tokens: int, text: str | None = None) -> list[list[int]]:
    """`num_documents` pieces of `num_tokens` tokens each, evenly spread over the text (None: the project's own).

    No piece crosses from one source into the next. Raises ValueError if the text is too short.
    """
    text = own_prose() if text is None else text
    pieces = [piece for _, section in sections(text) for piece in cut(tokenizer.encode(section), num_tokens)]
    if len(pieces) < num_documents:
        raise ValueError(f"the text gives {len(pieces)} documents of {num_tokens} tokens, {num_documents} were asked for")
    return [pieces[i * len(pieces) // num_documents] for i in range(num_documents)]


def sections(text: str) -> list[tuple[str, str]]:
    """The sources of a text, by name, and what each says.

    >>> sections("=== a.md\\n\\nOne.\\n\\n=== b.md\\n\\nTwo.\\n")
    [('a.md', 'One.'), ('b.md', 'Two.')]
    """
    before, *named = re.split(rf"^{re.escape(SECTION)}(.*)$", text, flags=re.MULTILINE)
    found = [("", before), *zip(named[::2], named[1::2], strict=True)]
    return [(name, part.strip()) for name, part in found if part.strip()]


def cut(token_ids: Sequence[int], num_tokens: int) -> list[list[int]]:
    """Pieces of equal length, one behind the other; what is left at the end is in none."""
    return [list(token_ids[i : i + num_tokens]) for i in range(0, len(token_ids) - num_tokens + 1, num_tokens)]


if __name__ == "__main__":
    (Path(__file__).parent / "prose.txt").write_text(collect(map(Path, sys.argv[1:])), encoding="utf-8")
