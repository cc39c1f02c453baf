import json

import pytest
import torch
from safetensors.torch import save_file

from minserve.model.config import ModelConfig
from minserve.model.decoder import Decoder
from minserve.model.weights import BrokenCheckpoint, Checkpoint, RandomWeights
from tests.model.tiny_net import full_logits, tokens_for

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


class Recorder(RandomWeights):
    """Remembers what a decoder asks for: the names and shapes of a whole checkpoint."""

    def __init__(self):
        super().__init__(seed=1, spread=0.3)
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, name, shape):
        self.tensors[name] = super().take(name, shape)
        return self.tensors[name]


def tensors_of(**changes) -> dict[str, torch.Tensor]:
    recorder = Recorder()
    Decoder(ModelConfig.from_dict({**CONFIG, **changes}), recorder)
    return recorder.tensors


def save(folder, tensors, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def save_shards(folder, shards, weight_map=None, config=CONFIG):
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = weight_map or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def halves(tensors):
    names = sorted(tensors)
    cut = len(names) // 2
    return {"a.safetensors": {n: tensors[n] for n in names[:cut]}, "b.safetensors": {n: tensors[n] for n in names[cut:]}}


def test_case_79_a_tied_head_is_the_embedding(tmp_path):
    save(tmp_path, tensors_of(tie_word_embeddings=True), tie_word_embeddings=True)
    decoder = Decoder.from_directory(tmp_path)
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ decoder.embedding.T)


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_case_79_any_other_missing_tensor_is_named(tmp_path, missing):
    tensors = tensors_of()
    del tensors[missing]
    save(tmp_path, tensors)
    with pytest.raises(BrokenCheckpoint, match=missing):
        Decoder.from_directory(tmp_path)


def test_case_80_a_tied_head_that_the_file_ships_too(tmp_path, recwarn):
    tensors = tensors_of(tie_word_embeddings=True)
    save(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tie_word_embeddings=True)
    Decoder.from_directory(tmp_path)
    assert not recwarn.list


def test_case_80_one_that_differs_is_reported_and_the_embedding_wins(tmp_path):
    tensors = tensors_of(tie_word_embeddings=True)
    save(tmp_path, {**tensors, "lm_head.weight": torch.zeros(40, 16)}, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"lm_head.weight differs from the embedding"):
        decoder = Decoder.from_directory(tmp_path)
    assert decoder.logits(torch.ones(1, 16)).abs().max() > 0


def test_case_82_a_shard_that_is_not_there(tmp_path):
    save_shards(tmp_path, halves(tensors_of()))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"b\.safetensors is missing"):
        Decoder.from_directory(tmp_path)


def test_case_82_a_shard_that_was_cut_short(tmp_path):
    save_shards(tmp_path, halves(tensors_of()))
    file = tmp_path / "b.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(BrokenCheckpoint, match=r"b\.safetensors is damaged or cut short"):
        Decoder.from_directory(tmp_path)


def test_case_82_an_index_that_names_a_tensor_twice(tmp_path):
    save_shards(tmp_path, {"a.safetensors": {"w": torch.ones(2)}, "b.safetensors": {"w": torch.ones(2)}})
    text = '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenCheckpoint, match=r"names w twice: in a\.safetensors and in b\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_case_83_the_index_says_which_copy_counts(tmp_path, order):
    shards = {
        "a.safetensors": {"w": torch.ones(4), "x": torch.zeros(1)},
        "b.safetensors": {"w": torch.full((4,), 2.0), "y": torch.zeros(1)},
    }
    whole_map = {"w": "a.safetensors", "x": "a.safetensors", "y": "b.safetensors"}
    weight_map = {tensor: file for letter in order for tensor, file in whole_map.items() if file.startswith(letter)}
    save_shards(tmp_path, shards, weight_map)
    assert Checkpoint(tmp_path).take("w", (4,)).tolist() == [1.0] * 4


def test_a_tensor_that_its_shard_does_not_hold(tmp_path):
    save_shards(tmp_path, {"a.safetensors": {"w": torch.ones(2)}}, {"w": "a.safetensors", "v": "a.safetensors"})
    with pytest.raises(BrokenCheckpoint, match=r"a\.safetensors holds v, but it does not"):
        Checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(BrokenCheckpoint, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_a_wrong_shape_is_named(tmp_path):
    save(tmp_path, {**tensors_of(), "model.norm.weight": torch.ones(17)})
    with pytest.raises(BrokenCheckpoint, match=r"model\.norm\.weight has shape \(17,\), the config says \(16,\)"):
        Decoder.from_directory(tmp_path)


def test_tensors_that_nobody_takes_are_reported(tmp_path):
    save(tmp_path, {**tensors_of(), "model.layers.0.self_attn.q_proj.bias": torch.ones(16), "model.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.warns(UserWarning, match=r"1 tensors are not part of a LlamaForCausalLM: model.layers.0.self_attn.q_proj.bias"):
        Decoder.from_directory(tmp_path)


def test_shards_give_the_logits_of_one_file(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    save(one, tensors_of())
    save_shards(many, halves(tensors_of()))
    prompt = tokens_for(3, 20, 40)
    assert torch.equal(full_logits(Decoder.from_directory(one), prompt), full_logits(Decoder.from_directory(many), prompt))


def test_weights_do_not_live_in_the_mapped_file(tmp_path):
    """A model that is fetched again while it is served must not change under the server."""
    save(tmp_path, tensors_of())
    decoder, prompt = Decoder.from_directory(tmp_path), tokens_for(4, 12, 40)
    before = full_logits(decoder, prompt)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as out:
        out.seek(-(1 << 10), 2)
        out.write(b"\0" * (1 << 10))
    assert torch.equal(full_logits(decoder, prompt), before)


def test_random_weights_are_the_same_for_the_same_seed():
    a, b = RandomWeights(5).take("w", (3, 4)), RandomWeights(5).take("w", (3, 4))
    assert torch.equal(a, b) and RandomWeights(5).take("input_layernorm.weight", (3,)).tolist() == [1.0] * 3
