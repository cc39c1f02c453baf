"""Which backend serves, and what it says where the one that was asked for cannot."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from minserve.llm import LLM
from minserve.model import operations
from minserve.model.attention_triton import TritonOperations
from minserve.model.linear import Linear
from minserve.model.operations import BackendUnavailable, TorchOperations, choose_operations
from minserve.model.rope import rotation
from minserve_kernels import reference
from minserve_kernels.interpret import interpreted
from tests.tiny_model import save_tiny_model

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def a_card_of_2022(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@dataclass
class StandInCache:
    """What the choice asks of a cache."""

    device: torch.device = CARD
    block_size: int = 16
    head_dim: int = 64
    kv_cache_dtype: str = "bf16"


def chosen(backend: str, **cache) -> tuple[str, str]:
    made, why = choose_operations(backend, StandInCache(**cache))  # pyright: ignore[reportArgumentType]
    return made.name, why


def test_by_itself_the_kernels_on_a_gpu_and_torch_elsewhere():
    assert chosen("auto") == ("triton", "on cuda:0")
    assert chosen("auto", device=CPU) == ("torch", "since cpu is no CUDA or HIP device")
    with interpreted():
        assert chosen("auto", device=CPU)[0] == "torch"  # slow kernels only where someone asks for them


def test_told_it_does_as_told():
    assert chosen("torch") == ("torch", "as asked for")
    assert chosen("triton") == ("triton", "on cuda:0")
    with interpreted():
        assert chosen("triton", device=CPU) == ("triton", "on cpu")
    with pytest.raises(ValueError, match="'cuda' is not known; known: auto, torch, triton"):
        chosen("cuda")


def test_kernels_on_a_cpu_want_the_interpreter():
    with pytest.raises(BackendUnavailable, match=r"CUDA and HIP devices, this is cpu; .*minserve_kernels.interpret.interpreted\(\)"):
        chosen("triton", device=CPU)


@pytest.mark.parametrize(
    ("cache", "capability", "words"),
    [
        ({"block_size": 24}, (9, 0), "blocks of a power of two from 16 slots, not of 24"),
        ({"block_size": 8}, (9, 0), "not of 8"),
        ({"head_dim": 256}, (9, 0), "heads of up to 128 numbers, the model's have 256"),
        ({}, (7, 5), "cuda:0 has compute capability 7.5, Triton needs 8.0"),
        ({"kv_cache_dtype": "fp8"}, (8, 0), "cuda:0 has compute capability 8.0, kernels need 8.9 for fp8; int8 takes about as few bytes"),
    ],
)
def test_what_kernels_cannot_serve_goes_to_torch_unless_they_were_asked_for(monkeypatch, cache, capability, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    name, why = chosen("auto", **cache)
    assert name == "torch" and why.startswith("since ") and why.endswith(words)
    with pytest.raises(BackendUnavailable, match=words):
        chosen("triton", **cache)


def test_fp8_is_for_cards_that_have_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert chosen("auto", kv_cache_dtype="fp8")[0] == "triton"


def test_a_machine_without_triton(monkeypatch):
    monkeypatch.setattr(operations, "find_spec", lambda name: None)
    assert chosen("auto") == ("torch", "since Triton is not installed; on Linux: pip install 'minserve[triton]'")
    with pytest.raises(BackendUnavailable, match="Triton is not installed"):
        chosen("triton")


def test_an_llm_says_who_attends(tmp_path):
    path = save_tiny_model(tmp_path)
    with LLM(path, num_blocks=40, verbose=False, dtype="fp32") as llm:
        assert llm.describe().splitlines()[2] == "attention backend: torch, since cpu is no CUDA or HIP device"
        want = llm.generate("Hi", max_tokens=3)[0].token_ids
    with interpreted(), LLM(path, num_blocks=40, verbose=False, dtype="fp32", attention_backend="triton") as llm:
        assert llm.describe().splitlines()[2] == "attention backend: triton, on cpu"
        assert llm.generate("Hi", max_tokens=3)[0].token_ids == want
    with pytest.raises(BackendUnavailable, match="attention_backend='triton'"):
        LLM(path, num_blocks=40, verbose=False, attention_backend="triton")
    with pytest.raises(ValueError, match="cuda_graphs=True needs attention_backend 'triton' on a CUDA device, this is 'torch' on cpu"):
        LLM(path, num_blocks=40, verbose=False, cuda_graphs=True)


# --- both give the same numbers -------------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=["reference", "kernels"])
def kernels(request):
    """The operations by kernels: their meaning in torch, and themselves in the interpreter."""
    if request.param == "reference":
        yield TritonOperations(reference, needs_device=False)
    else:
        with interpreted():
            yield choose_operations("triton", StandInCache(device=CPU))[0]  # pyright: ignore[reportArgumentType]


def test_norms(kernels):
    x, weight = numbers(3, 48), numbers(48)
    assert torch.allclose(kernels.norm(x, weight, 1e-5), TorchOperations().norm(x, weight, 1e-5), atol=1e-5)
    heads, weight = numbers(3, 5, 32)[:, 1:4], numbers(32)  # as queries and keys are normed: heads of a larger product
    assert torch.allclose(kernels.norm(heads, weight, 1e-5), TorchOperations().norm(heads, weight, 1e-5), atol=1e-5)


def test_the_residual_stream(kernels):
    linear, y, x, weight = Linear(numbers(48, 40)), numbers(3, 40), numbers(3, 48), numbers(48)
    want, want_sum = TorchOperations().add_norm(linear, y, x.clone(), weight, 1e-5)
    got, got_sum = kernels.add_norm(linear, y, x.clone(), weight, 1e-5)
    assert torch.allclose(got, want, atol=1e-5) and torch.allclose(got_sum, want_sum, atol=1e-5)


def test_rope_turns_queries_and_keys_where_they_are(kernels):
    product = numbers(3, 4 + 2 + 2, 32)  # values behind keys, which stay as they are
    want, got = product.clone(), product.clone()
    turn = rotation(torch.tensor([0, 5, 900]), 1 / 10_000 ** torch.linspace(0, 1, 16))
    TorchOperations().rotate_(want[:, :6], 4, turn)
    kernels.rotate_(got[:, :6], 4, turn)
    assert torch.allclose(got, want, atol=1e-5) and torch.equal(got[:, 6:], product[:, 6:])
    assert not torch.allclose(got, product, atol=1e-2)


def test_swiglu(kernels):
    gate_up = numbers(3, 2 * 40)
    assert torch.allclose(kernels.swiglu(gate_up), TorchOperations().swiglu(gate_up.clone()), atol=1e-5)
