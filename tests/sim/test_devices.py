"""The catalogue of devices: peaks as their data sheets say, shares that make sense, files that can be read back."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from minserve.sim.devices import DEVICES, DeviceSpec, UnknownDevice, device_from_dict, load_device


@pytest.mark.parametrize(
    ("name", "memory_gb", "gb_per_s", "tflops"),
    [
        ("a100-80gb", 80, 2039, 312),
        ("h100", 80, 3350, 989),
        ("h200", 141, 4800, 989),
        ("l4", 24, 300, 121),
        ("rtx-4090", 24, 1008, 165),
        ("t4", 16, 320, 65),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, memory_gb: float, gb_per_s: float, tflops: float):
    device = DEVICES[name]
    assert (device.memory_bytes, device.bytes_per_s, device.flops_per_s) == (memory_gb * 1e9, gb_per_s * 1e9, tflops * 1e12)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_shares_are_shares_and_every_device_says_where_it_is_from(device: DeviceSpec):
    shares = [device.weight_read_share, device.kv_read_share, device.attention_share, *(share for _, share in device.matmul_shares)]
    assert all(0 < share <= 1 for share in shares)
    assert device.source and device.name == device.name.lower()
    assert DEVICES[device.name] is device


def test_the_ridge_of_an_a100():
    assert DEVICES["a100-80gb"].ridge_flops_per_byte == pytest.approx(153, rel=0.01)


def test_the_share_of_a_product_grows_with_its_rows_and_levels_off():
    device = replace(DEVICES["a100-80gb"], matmul_shares=((16, 0.2), (64, 0.4), (256, 0.6)))
    assert [device.matmul_share(rows) for rows in (1, 16, 32, 64, 128, 256, 10_000)] == pytest.approx([0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6])


def test_a_device_by_name_or_from_its_own_file(tmp_path: Path):
    device = replace(DEVICES["l4"], name="mine", matmul_shares=((1, 0.1), (512, 0.5)), source="measured here")
    device.save(tmp_path / "folder" / "mine.json")
    assert load_device(tmp_path / "folder" / "mine.json") == device
    assert load_device("A100-80GB") is DEVICES["a100-80gb"]


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(UnknownDevice, match="no device 'a1000': .* or one of a100-80gb, .*t4"):
        load_device("a1000")


def test_fields_that_are_missing_or_unknown_are_named():
    values = {**asdict(DEVICES["t4"]), "colour": "green"}
    del values["bytes_per_s"]
    with pytest.raises(ValueError, match=r"mine.json: not a device \(unknown: colour, missing: bytes_per_s\)"):
        device_from_dict(values, "mine.json")
