"""The bar that the formats are held to, on the real model and a little of the real text: `minserve quality` measures it with all."""

import math
from pathlib import Path

import torch

from minserve.quantize.prose import documents
from minserve.quantize.quality import COUNT, KL, NLL, REFERENCE_NLL, compare_distributions
from minserve.quantize.subjects import OpenModel, make_runner, parse_format, with_outliers


def ratio_and_kl(model: OpenModel, names: list[str]) -> list[tuple[float, float]]:
    decoder = model.decoder(torch.float32)
    base, *measured = (make_runner(model, decoder, "fp32", parse_format(name), 64) for name in ("fp32", *names))
    sums = compare_distributions(base, measured, documents(model.tokenizer, 4, 128)).sum(1)  # [formats, 5]
    return [(math.exp((s[NLL] - s[REFERENCE_NLL]) / s[COUNT]), float(s[KL] / s[COUNT])) for s in sums]


def test_int8_and_int4_stay_within_the_bar(default_model_dir: Path) -> None:
    [(int8_ratio, int8_kl), (int4_ratio, int4_kl)] = ratio_and_kl(OpenModel.from_name(default_model_dir), ["int8", "int4"])
    assert abs(int8_ratio - 1) < 0.005 and 0 < int8_kl < 0.01
    assert abs(int4_ratio - 1) < 0.05 and int8_kl < int4_kl < 0.1


def test_with_loud_key_channels_int4_needs_its_mixing(default_model_dir: Path) -> None:
    loud = with_outliers(OpenModel.from_name(default_model_dir), factor=8.0)
    [(mixed_ratio, mixed_kl), (bare_ratio, bare_kl)] = ratio_and_kl(loud, ["int4", "int4-unmixed"])
    assert abs(mixed_ratio - 1) < 0.05 and mixed_kl < 0.15
    assert bare_ratio > 1.2 and bare_kl > 0.3
