"""Text to token ids and back: prompts, chat templates, and text that grows by one token at a time.

Why: a token is a few bytes, a character up to four, and a stop string any number of tokens. What a client sees must
still be whole characters, and never the beginning of a stop string that is then completed. So text is held back, but
never longer than it has to be.

Invariant: the pieces that a `Detokenizer` hands out, joined, are its `text`; it depends on the ids alone, not on who
streams; no piece is taken back; the work per token does not grow with the length of the text.

Taught in notebook 12.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minserve.core.request import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet one

Message = Mapping[str, Any]


class TextTokenizer(Protocol):
    """What the engine needs of a tokenizer. Ids from `num_tokens_known` on are padding of the model's vocabulary."""

    @property
    def num_tokens_known(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens by which the model says that it is done."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Iterable[int]) -> str: ...
    def chat(self, messages: Sequence[Message]) -> list[int]: ...
    def has_text(self, token_id: int) -> bool:
        """False for special tokens and for ids outside the vocabulary: they decode to nothing."""
        ...


class Tokenizer:
    """The tokenizer of a Hugging Face directory, loaded without the network."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        tokenizer = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"{self.directory} has no tokenizer.json, only a {type(tokenizer).__name__}: convert it with transformers")
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.num_tokens_known = max(tokenizer.get_vocab().values()) + 1  # len() would miss ids above a gap
        own_eos = tokenizer.eos_token_id
        self.eos_ids: frozenset[int] = read_eos_ids(self.directory) | ({own_eos} if isinstance(own_eos, int) else set())

    def encode(self, text: str) -> list[int]:
        """Ids of a plain completion prompt, with the special tokens that the tokenizer itself puts around it.

        The names of special tokens inside `text` become those tokens, as in transformers and vLLM.
        """
        return self._backend.encode(_checked_text(text)).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids; special tokens and unknown ids add nothing. Spaces stay as they are: no clean-up."""
        return self._backend.decode([token_id for token_id in token_ids if self.has_text(token_id)])

    def has_text(self, token_id: int) -> bool:
        return 0 <= token_id < self.num_tokens_known and token_id not in self._special_ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the model's own template, ready for the assistant's turn. Raises InvalidRequest."""
        checked = check_messages(messages)
        if self._tokenizer.chat_template is None:
            raise InvalidRequest(
                f"the tokenizer in {self.directory} has no chat template: send a completion prompt instead, or add a "
                "chat_template.jinja to that directory (instruction-tuned variants of a model ship one)"
            )
        try:
            text = self._tokenizer.apply_chat_template(checked, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template is a program that ships with the model: whatever it trips over, it is the messages it got.
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        return self._backend.encode(_checked_text(str(text)), add_special_tokens=False).ids


class ByteTokenizer:
    """Id 0-255 is that byte, 256 starts a text and 257 ends it: enough for tests and notebooks, with no file."""

    START_ID = 256
    END_ID = 257
    num_tokens_known = 258
    eos_ids = frozenset({END_ID})

    def encode(self, text: str) -> list[int]:
        return list(_checked_text(text).encode())

    def decode(self, token_ids: Iterable[int]) -> str:
        return bytes(token_id for token_id in token_ids if self.has_text(token_id)).decode(errors="replace")

    def has_text(self, token_id: int) -> bool:
        return 0 <= token_id < 256

    def chat(self, messages: Sequence[Message]) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in check_messages(messages)]
        return [self.START_ID, *self.encode("".join(lines) + "assistant:")]


def read_eos_ids(directory: Path) -> frozenset[int]:
    """All end tokens that config.json and generation_config.json name: the one does not replace the other."""
    eos_ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        eos_ids.update(named if isinstance(named, list) else () if named is None else (named,))
    return frozenset(eos_ids)


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: lone surrogate at character {error.start} of {len(text)}") from error
    return text


# -- chat messages --------------------------------------------------------------------------------------------------


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with a known role and with text as content; lists of text parts become one text. Else InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages is empty: a chat needs at least one message")
    return [_check_message(place, message) for place, message in enumerate(messages)]


def _check_message(place: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{place}] must be an object with role and content, got {message!r}")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"messages[{place}].role must be one of {', '.join(ROLES)}, got {role!r}")
    return {**message, "content": _text_of(message.get("content"), f"messages[{place}].content")}


def _text_of(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{name} must be a string or a list of text parts, got {content!r}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{name} may hold only parts of the form {{'type': 'text', 'text': ...}}, got {part!r}")
    return "".join(part["text"] for part in content)


# -- text that grows ------------------------------------------------------------------------------------------------


class Detokenizer:
    """Turns the output ids of one request into text that is safe to show as it comes.

    A character whose bytes are not all there is held back, and dropped if the output ends before them. Bytes that can
    never become a character come out as U+FFFD, at most three tokens later.

    Of several stop strings the one that is complete first wins (of those complete at the same place, the longest); the
    text ends before it. So neither their order in the list nor the cut into tokens matters. They match characters as
    they are: composed and decomposed forms of a syllable differ. The text of the first `min_tokens` tokens is not
    searched. Tokens in `stop_ids` add no text.

    >>> detokenizer = Detokenizer(ByteTokenizer(), stop=("lo w",))
    >>> [detokenizer.push(byte) for byte in b"hello world"]
    ['h', 'e', '', 'l', '', '', '', '', '', '', '']
    >>> detokenizer.stopped, detokenizer.text
    (True, 'hel')
    """

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str] = (), min_tokens: int = 0, stop_ids: AbstractSet[int] = frozenset()
    ) -> None:
        self.stopped = False
        self._characters = _CharacterStream(tokenizer)
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._held = ""  # a beginning of a stop string

    @property
    def text(self) -> str:
        """All text handed out so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Take the next output token; returns the text that has become safe to show, often one word or nothing."""
        self._num_tokens += 1
        if self.stopped or token_id in self._stop_ids:
            return ""
        piece = self._characters.push(token_id)
        return self._show(piece if self._num_tokens <= self._min_tokens else self._before_stop(piece))

    def finish(self) -> str:
        """The output has ended: returns what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _before_stop(self, piece: str) -> str:
        """The part of the held text and `piece` that can go out. Sets `stopped` when a stop string is complete."""
        text = self._held + piece
        found = find_first_stop(text, self._stop)
        self.stopped = found is not None
        num_safe = len(text) - num_held_characters(text, self._stop) if found is None else found
        self._held = "" if self.stopped else text[num_safe:]
        return text[:num_safe]


def find_first_stop(text: str, stops: Iterable[str]) -> int | None:
    """Where the stop string begins that is complete first in `text`; None where there is none."""
    matches = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(matches)[1] if matches else None


def num_held_characters(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins a stop string.

    >>> num_held_characters("hello <", ["<|sep|>"])
    1
    """
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class _CharacterStream:
    """Text of a growing list of ids, in whole characters.

    Decoding is not additive: a character may span tokens, and some decoders drop a leading space. So a window of the
    last tokens is decoded, beginning at a place where a character ended: `context` tokens whose text is out already,
    then new ones. `num_shown` counts the window's characters that are out.

    U+FFFD at the end may still turn into a character. Byte-level decoders write one for an unfinished character,
    byte-fallback decoders one for each byte of the run. After as many tokens as a character has bytes at most, only
    the last mark is still open.
    """

    MAX_CHARACTER_BYTES = 4
    MAX_NEW_TOKENS = 16  # without a clean end for so long, the window is cut to its last half anyhow

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0
        self._num_shown = 0
        self._num_open_tokens = 0  # since the text last ended in a whole character

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id):
            return ""  # kept out of the window: in it, it would count as the first token to decoders that strip
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        num_marks = len(text) - len(text.rstrip(REPLACEMENT))
        self._num_open_tokens = self._num_open_tokens + 1 if num_marks else 0
        num_ready = len(text) - (num_marks if self._num_open_tokens < self.MAX_CHARACTER_BYTES else 1)
        piece = text[self._num_shown : num_ready]
        self._num_shown = max(self._num_shown, num_ready)
        if piece and not num_marks:
            self._restart()
        elif len(self._window) - self._num_context >= self.MAX_NEW_TOKENS:
            self._cut(len(text))
        return piece

    def _restart(self) -> None:
        """The text ends in a whole character: the new tokens become the context of those to come."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_shown = len(self._tokenizer.decode(self._window))

    def _cut(self, num_characters: int) -> None:
        """Forget the older half of a window that never ends clean; what is not out yet is counted from its end."""
        num_open = num_characters - self._num_shown
        self._window = self._window[-self.MAX_NEW_TOKENS // 2 :]
        self._num_context = 0
        self._num_shown = max(0, len(self._tokenizer.decode(self._window)) - num_open)
