"""Calibration text: which, and that walking through layers one by one is what the decoder does."""

import inspect

import pytest
import torch

from minserve.model.config import ModelConfig
from minserve.model.decoder import Decoder, load_layer
from minserve.model.tokenizer import ByteTokenizer
from minserve.quantize import small_model
from minserve.quantize.prose import documents, own_prose, sections
from minserve.quantize.quality import Sample
from minserve.quantize.walk import HELD_OUT, MEASURED_DOCUMENTS, MEASURED_TOKENS, PRODUCTS, TOKENS_AT_ONCE, Walk, calibration_documents
from tests.model.tiny_net import full_logits, tiny_config, tokens_for
from tests.quantize.fixed_weights import FixedWeights

CONFIG = tiny_config(num_layers=3)
OTHER_FAMILIES = tiny_config(num_layers=3, qk_norm=True, qkv_bias=True, windows=(None, 16, 40))
# Two steps, the second of them smaller, and documents of two lengths.
TEXTS = [tokens_for(seed, 200 if seed == 1 else 190) for seed in range(TOKENS_AT_ONCE // 200 + 2)]


@pytest.fixture(scope="module")
def weights() -> FixedWeights:
    return FixedWeights()


@pytest.mark.parametrize("config", [CONFIG, OTHER_FAMILIES])
def test_walking_through_all_layers_is_the_decoder(weights: FixedWeights, config: ModelConfig) -> None:
    decoder, walk = Decoder(config, weights), Walk(config, weights, TEXTS, torch.float32)
    assert [len(stream) for stream in walk.streams] == [1910, 380]
    for index in range(config.num_layers):
        walk.streams = walk.through(load_layer(config, weights, index, walk.dtype))
    texts = iter(TEXTS)
    for stream, layout in zip(walk.streams, walk.layouts, strict=True):
        of_step = [next(texts) for _ in layout.rows]
        logits = decoder.logits(torch.rms_norm(stream, (config.hidden_size,), decoder.norm, config.norm_eps))
        pieces = logits.split([row.num_tokens for row in layout.rows])
        for row, piece in zip(layout.rows, pieces, strict=True):
            assert torch.allclose(piece, full_logits(decoder, of_step[int(row.request.request_id)]), atol=1e-4)


def test_watching_changes_nothing_and_sees_the_inputs(weights: FixedWeights) -> None:
    walk, layer = Walk(CONFIG, weights, TEXTS, torch.float32), load_layer(CONFIG, weights, 0, torch.float32)
    grams, streams = walk.watch(layer)
    assert all(torch.equal(seen, alone) for seen, alone in zip(streams, walk.through(layer), strict=True))
    assert {name: len(grams[name].matrix) for name in PRODUCTS} == {"qkv": 64, "output": 128, "gate_up": 64, "down": 96}
    assert {gram.num_tokens for gram in grams.values()} == {sum(map(len, TEXTS))}
    x = torch.rms_norm(torch.cat(walk.streams), (64,), layer.attention_norm, CONFIG.norm_eps).double()
    assert torch.allclose(grams["qkv"].matrix.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    assert torch.allclose(grams["qkv"].magnitude.double(), x.abs().mean(0), rtol=1e-4)


def test_calibration_reads_nothing_that_is_measured_on() -> None:
    tokenizer = ByteTokenizer()
    for num_documents, num_tokens in ((64, 256), (20, 1000)):
        found = [tokenizer.decode(ids) for ids in calibration_documents(tokenizer, num_documents, num_tokens)]
        assert len(set(found)) == num_documents
        assert all(piece in own_prose() for piece in found)
        held_out = " ".join(text for name, text in sections(own_prose()) if name in HELD_OUT)
        measured = [tokenizer.decode(ids) for ids in documents(tokenizer, MEASURED_DOCUMENTS, MEASURED_TOKENS)]
        assert not any(piece[:100] in held_out for piece in found)
        assert not any(part in piece for piece in found for whole in measured for part in (whole[:80], whole[-80:]))


def test_what_is_measured_on_is_what_the_measuring_code_says() -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(Sample.draw).parameters.items()}
    assert (defaults["num_documents"], defaults["document_tokens"]) == (MEASURED_DOCUMENTS, MEASURED_TOKENS)
    assert HELD_OUT == small_model.HELD_OUT
    assert set(HELD_OUT) < {name for name, _ in sections(own_prose())}


def test_a_seed_chooses_the_documents() -> None:
    tokenizer = ByteTokenizer()
    same, again, other = (calibration_documents(tokenizer, 10, 50, seed) for seed in (1, 1, 2))
    assert same == again != other
    assert all(len(ids) == 50 for ids in same)


def test_of_more_text_than_there_is_all_is_read() -> None:
    tokenizer = ByteTokenizer()
    found = calibration_documents(tokenizer, 10_000, 2000)
    assert 20 < len(found) < 100 and {len(ids) for ids in found} == {2000}
    with pytest.raises(ValueError, match=r"no piece of the calibration text has 50000 tokens; the longest has \d+"):
        calibration_documents(tokenizer, 1, 50_000)
