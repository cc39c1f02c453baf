"""Detokenizing, stop strings and chat templates, on tokenizers built here and on the default model's own."""

import json
import random
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models
from transformers import PreTrainedTokenizerFast

from minserve.core.request import InvalidRequest
from minserve.model.tokenizer import ByteTokenizer, Detokenizer, TextTokenizer, Tokenizer, find_first_stop, num_held_characters

MARK = "\ufffd"
KOREAN = "삼겹살 먹자! 한글과 English를 섞어서"


class PiecesTokenizer(ByteTokenizer):
    """Token i is the i-th of some pieces of bytes: any cut of any text. Remembers the longest list that it had to decode."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = list(pieces)
        self.num_most_decoded = 0

    def decode(self, token_ids: Iterable[int]) -> str:
        known = [self.pieces[token_id] for token_id in token_ids]
        self.num_most_decoded = max(self.num_most_decoded, len(known))
        return b"".join(known).decode(errors="replace")

    def has_text(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.pieces)


def stream(tokenizer: TextTokenizer, token_ids: Iterable[int], **settings) -> list[str]:
    """The pieces a client would see, the last one from finish(); checks the law that ties them to the whole text."""
    detokenizer = Detokenizer(tokenizer, **settings)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces


def stream_bytes(pieces: Sequence[bytes | str], **settings) -> list[str]:
    as_bytes = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return stream(PiecesTokenizer(as_bytes), range(len(as_bytes)), **settings)


def cut(text: str, num_bytes: int) -> list[bytes]:
    data = text.encode()
    return [data[start : start + num_bytes] for start in range(0, len(data), num_bytes)]


# -- tokenizers of both kinds, as files -----------------------------------------------------------------------------


def byte_level_name(data: bytes) -> str:
    """How byte-level vocabularies write bytes: visible Latin-1 as itself, the others as the letters from U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in data)


def save(path: Path, names: Sequence[str], decoder: decoders.Decoder, special: Sequence[str] = (), **settings) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(path)
    return Tokenizer(path)


def save_byte_level(path: Path, pieces: Sequence[bytes], **settings) -> Tokenizer:
    return save(path, [byte_level_name(piece) for piece in pieces], decoders.ByteLevel(), **settings)


def save_byte_fallback(path: Path, names: Sequence[str]) -> Tokenizer:
    """As SentencePiece models are: ids 0-255 are bytes, then `names`; the text's first space is dropped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return save(path, [f"<0x{byte:02X}>" for byte in range(256)] + list(names), decoders.Sequence(steps))


# -- whole characters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 2, 5])
def test_case_137_korean_syllables_at_piece_boundaries(num_bytes, tmp_path):
    parts = cut(KOREAN, num_bytes)
    names = sorted(set(parts))
    for pieces in (stream_bytes(parts), stream(save_byte_level(tmp_path, names), [names.index(part) for part in parts])):
        assert "".join(pieces) == KOREAN
        assert MARK not in "".join(pieces)
        # Never longer than needed: all but the unfinished character is out at once.
        data = b"".join(parts)
        for done in range(1, len(parts)):
            assert "".join(pieces[:done]) == data[: done * num_bytes].decode(errors="ignore")


def test_case_137_korean_by_byte_fallback(tmp_path):
    assert "".join(stream(save_byte_fallback(tmp_path, []), KOREAN.encode())) == KOREAN


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_case_139_limit_in_the_middle_of_a_character(max_tokens, tmp_path):
    expected = ["", "", "안", "안", "안", "안녕", "안녕", "안녕", "안녕", "안녕😊"][max_tokens - 1]  # the unfinished one is dropped
    ids = "안녕😊".encode()[:max_tokens]
    for tokenizer in (ByteTokenizer(), save_byte_fallback(tmp_path, [])):
        assert "".join(stream(tokenizer, ids)) == expected


def test_case_140_a_character_is_sent_once():
    world = "世".encode()
    pieces = stream_bytes([b"A " + world + world[:1], world[1:2], world[2:] + b"ab"])
    assert pieces == ["A 世", "", "世ab", ""]
    assert stream_bytes([b"A " + world[:2], world[2:] + b"a" + world[:2], b"b"]) == ["A ", "世a", MARK + "b", ""]


def random_text(rng: random.Random) -> str:
    letters = ["abc XYZ.,\n", "한글삼겹살먹자각", "世界漢字語", "😊🦙👩‍👩‍👧🇰🇷", "éüß  "]
    return "".join(rng.choice(rng.choice(letters)) for _ in range(rng.randint(1, 40)))


def random_cut(rng: random.Random, data: bytes) -> list[bytes]:
    places = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, len(data))))})
    return [data[start:end] for start, end in zip(places, places[1:], strict=False)]


def test_case_140_fuzz_of_1000_mixes_cut_at_random_bytes(tmp_path):
    rng = random.Random(140)
    byte_level = save_byte_level(tmp_path / "level", [bytes([byte]) for byte in range(256)])
    fallback = save_byte_fallback(tmp_path / "fallback", ["▁"])
    for _ in range(1_000):
        text = random_text(rng)
        assert "".join(stream_bytes(random_cut(rng, text.encode()))) == text
        assert "".join(stream(byte_level, text.encode())) == text
        # Bytes and whole tokens mixed: a "▁" wherever there is a space.
        ids = [256 if byte == 32 else byte for byte in text.encode()]
        assert "".join(stream(fallback, ids)) == fallback.decode(ids)


def test_bytes_that_are_no_character_come_out_as_marks():
    assert stream_bytes([b"a", b"\x80", b"b"]) == ["a", "", MARK + "b", ""]
    assert "".join(stream_bytes(["x", MARK, "y"])) == "x" + MARK + "y"  # a mark that the model itself wrote
    pieces = stream_bytes([b"\x80"] * 40 + [b"z"])
    assert "".join(pieces) == MARK * 40 + "z"
    assert "".join(pieces[:20]) == MARK * 19  # while they go on, only the last may still be open


def test_random_bytes_equal_decoding_them_all():
    rng = random.Random(7)
    for _ in range(300):
        data = bytes(rng.choice([0x41, 0x80, 0xBF, 0xE1, 0xEC, 0x95, 0x88, 0xF0, 0x9F, 0xFF]) for _ in range(rng.randint(1, 80)))
        text = "".join(stream_bytes(random_cut(rng, data)))
        assert text.rstrip(MARK) == data.decode(errors="replace").rstrip(MARK)


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 7])
def test_work_per_token_does_not_grow(num_bytes):
    """Pieces that always end inside a character never give a clean place to restart, and must not pile up either."""
    text = "a" + "가" * 3_000
    tokenizer = PiecesTokenizer(cut(text, num_bytes))
    assert "".join(stream(tokenizer, range(len(tokenizer.pieces)))) == text
    assert tokenizer.num_most_decoded <= 32


def test_a_run_of_broken_bytes_of_a_fallback_tokenizer_recovers(tmp_path):
    tokenizer = save_byte_fallback(tmp_path, ["▁end"])
    text = "".join(stream(tokenizer, [0x80] * 50 + [256]))
    assert text.endswith(MARK + " end") and set(text[:-4]) == {MARK} and 40 <= len(text) <= 60


# -- spaces, special tokens, padding --------------------------------------------------------------------------------


def test_case_142_leading_space_of_sentencepiece_tokens(tmp_path):
    names = ["<unk>", "▁", "▁leading", "▁x", "y"]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    for kind, decoder in enumerate([decoders.Metaspace(), decoders.Sequence(steps)]):
        tokenizer = save(tmp_path / str(kind), names, decoder, special=["<s>"])
        assert "".join(stream(tokenizer, [1, 2, 3])) == " leading x"
        assert "".join(stream(tokenizer, [5, 2, 3, 5, 3])) == "leading x x"  # a special token is not the first token
        rng = random.Random(142)
        for _ in range(100):
            ids = [rng.randint(1, 5) for _ in range(rng.randint(1, 12))]
            assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_case_142_leading_space_of_byte_level_tokens(tmp_path):
    tokenizer = save_byte_level(tmp_path, [b"<unk>", b" a", b" b", b" ", b"c"])
    assert stream(tokenizer, [1, 2, 3, 3, 4, 1]) == [" a", " b", " ", " ", "c", " a", ""]
    assert tokenizer.decode([1, 2, 3, 3, 4, 1]) == " a b  c a"


def test_case_86_ids_outside_the_tokenizer_decode_to_nothing(tmp_path):
    tokenizer = save_byte_level(tmp_path, [bytes([byte]) for byte in range(256)])
    assert tokenizer.num_tokens_known == 256
    assert stream(tokenizer, [104, 310, 105, 2**40, -1]) == ["h", "", "i", "", "", ""]
    assert tokenizer.decode([104, 310, 105, 2**40, -1]) == "hi"
    assert "".join(stream(ByteTokenizer(), [256, 104, 300, 105, 257])) == "hi"


def test_num_tokens_known_counts_past_a_gap(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    assert Tokenizer(tmp_path).num_tokens_known == 10


# -- stop strings ---------------------------------------------------------------------------------------------------


def test_case_143_stop_text_is_never_shown():
    assert stream_bytes(["ABC", "DEF", "G", "HI", "J", "KL"], stop=["DEFGHIJ"]) == ["ABC", "", "", "", "", "", ""]
    assert stream_bytes(["The", " quick", " brown", " fox"], stop=["own fox"]) == ["The", " quick", " br", "", ""]
    assert stream_bytes(["ABC", "DEF", "G", "X"], stop=["DEFGHIJ"]) == ["ABC", "", "", "DEFGX", ""]
    detokenizer = Detokenizer(ByteTokenizer(), stop="ab")
    assert [detokenizer.push(byte) for byte in b"xab"] == ["x", "", ""] and detokenizer.stopped
    assert detokenizer.push(120) == "" and detokenizer.finish() == "" and detokenizer.text == "x"


def test_case_145_no_more_is_held_back_than_needed():
    stops = ["<|sep|>", "a" * 50]
    assert stream_bytes(["hello", " world", " <", "3"], stop=stops) == ["hello", " world", " ", "<3", ""]
    assert stream_bytes(["hello <|"], stop=stops) == ["hello ", "<|"]  # and the end of the output sets it free


@pytest.mark.parametrize("pieces", [["abcde"], ["a", "b", "c", "d", "e"], ["ab", "cde"]])
@pytest.mark.parametrize(("stops", "expected"), [(["cd", "bc"], "a"), (["e", "abc"], ""), (["bcd", "bc"], "a"), (["abcde", "bc"], "a")])
def test_case_146_the_stop_string_that_is_complete_first_wins(pieces, stops, expected):
    for order in (stops, stops[::-1]):
        assert "".join(stream_bytes(pieces, stop=order)) == expected


def test_case_148_korean_and_emoji_stop_strings():
    pieces = stream(ByteTokenizer(), "안녕 그그만 뒤".encode(), stop=["그만"])
    assert "".join(pieces) == "안녕 그" and MARK not in "".join(pieces)
    emoji = "😊".encode()
    assert stream_bytes(["hi ", emoji[:2], emoji[2:], " there"], stop=["😊"]) == ["hi ", "", "", "", ""]
    decomposed = unicodedata.normalize("NFD", "각")  # three letters that look like one syllable
    assert decomposed != "각"
    assert "".join(stream(ByteTokenizer(), decomposed.encode(), stop=["각"])) == decomposed


def test_stop_strings_by_fuzz_equal_the_character_by_character_rule():
    rng = random.Random(3)
    for _ in range(500):
        text = "".join(rng.choice("ab가") for _ in range(rng.randint(1, 30)))
        stops = ["".join(rng.choice("ab가") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        done = next((end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))), None)
        expected = text if done is None else text[: done - max(len(stop) for stop in stops if text[:done].endswith(stop))]
        assert "".join(stream_bytes(random_cut(rng, text.encode()), stop=stops)) == expected


def test_case_130_stop_strings_wait_for_min_tokens():
    assert stream(ByteTokenizer(), b"azzzzbzc", stop=["z"], min_tokens=5) == ["a", "z", "z", "z", "z", "b", "", "", ""]
    # What the first min_tokens tokens wrote is not searched, not even for the beginning of a stop string.
    assert "".join(stream(ByteTokenizer(), b"xyz", stop=["yz"], min_tokens=2)) == "xyz"
    assert "".join(stream(ByteTokenizer(), b"xyz", stop=["yz"], min_tokens=1)) == "x"


def test_finding_and_holding():
    assert find_first_stop("abcabc", ["ca", "bc"]) == 1
    assert find_first_stop("abc", ["x"]) is None and find_first_stop("abc", []) is None
    assert num_held_characters("abab", ["ababc", "abx"]) == 4
    assert num_held_characters("abab", ["abab"]) == 2  # a whole stop string is a match, not a beginning
    assert num_held_characters("abab", []) == 0


# -- end tokens -----------------------------------------------------------------------------------------------------


def letters_tokenizer(path: Path, **settings) -> Tokenizer:
    return save_byte_level(path, [bytes([97 + place]) for place in range(16)], **settings)


@pytest.mark.parametrize("config_eos", [[7, 9, 11], 9])
def test_case_85_several_end_ids(config_eos, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config_eos}), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 13}), encoding="utf-8")
    tokenizer = letters_tokenizer(tmp_path, eos_token="h")  # id 7
    assert tokenizer.eos_ids == {7, 9, 13} | ({11} if isinstance(config_eos, list) else set())
    for end_id in tokenizer.eos_ids:
        assert stream(tokenizer, [0, 1, 2, end_id], stop_ids=tokenizer.eos_ids) == ["a", "b", "c", "", ""]
    # With ignore_eos they are tokens like any other: generation goes on, and only special ones have no text.
    assert "".join(stream(tokenizer, [0, 1, 2, 9, 7, 3])) == "abcjd"


def test_case_85_no_source_names_an_end_id(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}), encoding="utf-8")
    assert letters_tokenizer(tmp_path).eos_ids == frozenset()


def test_stop_tokens_have_no_text():
    assert stream(ByteTokenizer(), b"abc", stop_ids={99}) == ["a", "b", "", ""]
    assert stream(ByteTokenizer(), b"ab", stop=["bx"], stop_ids={98}) == ["a", "", ""]
    assert stream(ByteTokenizer(), b"abc", stop=["bx"], stop_ids={99}) == ["a", "", "", "b"]


# -- chat -----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}p{% endif %}"
)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def test_case_88_no_chat_template(tmp_path):
    tokenizer = letters_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="has no chat template: send a completion prompt instead, or add a chat_template.jinja"):
        tokenizer.chat([user("a")])
    assert tokenizer.encode("b") == [1]


def test_case_89_the_template_refuses(tmp_path):
    tokenizer = letters_tokenizer(tmp_path, chat_template=TEMPLATE)
    with pytest.raises(InvalidRequest, match="the chat template refused the messages: System role not supported"):
        tokenizer.chat([{"role": "system", "content": "a"}, user("b")])
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        tokenizer.chat([user("a"), user("b")])


def test_case_89_a_template_that_breaks_is_the_callers_error_too(tmp_path):
    tokenizer = letters_tokenizer(tmp_path, chat_template="{{ messages[0].content + messages[0].missing.deeper }}")
    with pytest.raises(InvalidRequest, match="the chat template refused the messages"):
        tokenizer.chat([user("a")])


def test_case_89_content_as_parts(default_model_dir):
    tokenizer = Tokenizer(default_model_dir)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.chat([user(parts)]) == tokenizer.chat([user("ab")])


BAD_MESSAGES = [
    ([], "messages is empty"),
    ([user(None)], r"messages\[0\].content must be a string or a list of text parts, got None"),
    ([user("a"), {"role": "assistant"}], r"messages\[1\].content must be a string"),
    ([user([{"type": "image_url"}])], r"messages\[0\].content may hold only parts of the form"),
    ([user(["a"])], r"messages\[0\].content may hold only parts"),
    ([{"role": "wizard", "content": "a"}], r"messages\[0\].role must be one of system, developer, user, assistant, tool, got 'wizard'"),
    ([{"content": "a"}], "got None"),
    (["hello"], r"messages\[0\] must be an object with role and content, got 'hello'"),
]


@pytest.mark.parametrize(("messages", "problem"), BAD_MESSAGES)
def test_case_89_bad_messages_are_refused_by_name(messages, problem):
    with pytest.raises(InvalidRequest, match=problem):
        ByteTokenizer().chat(messages)


def test_byte_tokenizer_chat():
    tokenizer = ByteTokenizer()
    ids = tokenizer.chat([{"role": "system", "content": "be brief"}, user("hi")])
    assert ids[0] == 256 and tokenizer.decode(ids) == "system: be brief\nuser: hi\nassistant:"


def test_a_lone_surrogate_is_refused(tmp_path):
    for tokenizer in (ByteTokenizer(), letters_tokenizer(tmp_path)):
        with pytest.raises(InvalidRequest, match="lone surrogate at character 2 of 3"):
            tokenizer.encode("ab\ud800")


# -- the default model's own tokenizer ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(default_model_dir) -> Tokenizer:
    return Tokenizer(default_model_dir)


def test_default_model_knows_its_vocabulary_and_end(real):
    assert (real.num_tokens_known, real.eos_ids) == (49_152, {2})
    assert not real.has_text(2) and real.has_text(19_556) and not real.has_text(49_152)


def test_default_model_chat(real):
    ids = real.chat([user("Hi")])
    assert ids[0] == 1 and ids.count(2) == 2  # <|im_start|> ... <|im_end|>: a system turn of the template, then ours
    assert real.decode(ids).endswith("user\nHi\nassistant\n")
    own = real.chat([{"role": "system", "content": "Be brief."}, user("Hi")])
    assert real.decode(own) == "system\nBe brief.\nuser\nHi\nassistant\n"


@pytest.mark.parametrize(
    "text", ["Hello world", " leading", "a  b \n\n c", KOREAN, "e\u0301 ﷺ 🦙 👨‍👩‍👧‍👦", "don't . stop , me !", "def f(x):\n    return x"]
)
def test_default_model_streams_what_it_decodes(real, text):
    ids = real.encode(text)
    assert real.decode(ids) == text
    assert "".join(stream(real, ids)) == text


def test_default_model_by_fuzz(real):
    rng = random.Random(1)
    for _ in range(200):
        text = random_text(rng)
        assert "".join(stream(real, real.encode(text))) == text
        ids = [rng.randrange(49_152) for _ in range(20)]
        assert "".join(stream(real, ids)).rstrip(MARK) == real.decode(ids).rstrip(MARK)
