"""Builds sdist and wheel, installs the wheel into an environment of its own, and uses it there.

`python tests/try_wheel.py FOLDER`, with hatchling and ensurepip at hand and no network. The
wheel is built from the sdist, unpacked, as an installer would. torch and the rest are those of this
interpreter; the package is not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "online_softmax"
USE = """
import sys, torch, online_softmax
from importlib.metadata import version
assert online_softmax.__file__.startswith(sys.prefix), online_softmax.__file__
assert online_softmax.__version__ == version("online-softmax")
assert torch.equal(online_softmax.softmax(torch.zeros(1, 2)), torch.full((1, 2), 0.5))
from online_softmax import catalogue, jit
if not catalogue.lacks("cuda"):
    assert jit.compile("ladder/safe.cu", "safe<float>", "sm_90a").code
"""


def run(*command: str | Path, cwd: Path, is_alone: bool = True) -> str:
    """What a command prints; its own words and its exit code if it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or not is_alone}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def built(kind: str, source: Path, to: Path) -> Path:
    """The sdist or wheel that hatchling makes of a tree."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to)
    run(*command, cwd=source, is_alone=False)
    (file,) = to.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return file


def missing(names: set[str]) -> list[str]:
    """The package's files, by path below src, that are not among the names."""
    own = (p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sorted({p.relative_to(PACKAGE.parent).as_posix() for p in own} - names)


def main(folder: Path) -> None:
    if find_spec("hatchling") is None:
        sys.exit(f"no hatchling in {sys.executable}, which builds the wheel: pip install hatchling")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        sdist = built("sdist", ROOT, folder.resolve())
        shutil.unpack_archive(sdist, temporary)
        source = temporary / sdist.name.removesuffix(".tar.gz")
        wheel = built("wheel", source, folder.resolve())
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        if lacking := missing(names):
            sys.exit(f"{wheel.name} lacks {', '.join(lacking)}")
        strangers = {part.split("/")[0] for part in names} - {"online_softmax"}
        if [part for part in strangers if not part.endswith(".dist-info")]:
            sys.exit(f"{wheel.name} holds more than the package: {', '.join(sorted(strangers))}")

        home = temporary / "environment"
        venv.create(home, with_pip=True)  # pip's --python is not in that of every Python 3.10
        python = home / "bin" / "python"
        ask = "import site; print(site.getsitepackages()[0])"
        site = Path(run(python, "-c", ask, cwd=home).strip())
        # A folder named in a .pth file gives its packages, but not what its own .pth files name:
        # not the checkout.
        (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        install = ("install", "--no-index", "--no-deps", "--quiet", wheel)
        run(python, "-m", "pip", *install, cwd=temporary)

        elsewhere = temporary / "elsewhere"
        elsewhere.mkdir()
        run(python, "-c", USE, cwd=elsewhere)
        trace = ("trace", "1", "5", "3", "9", "2")
        traced = run(home / "bin" / "online-softmax", *trace, cwd=elsewhere)
        if "9.021802" not in traced:
            sys.exit(f"online-softmax trace 1 5 3 9 2 has no log-sum-exp of 9.021802:\n{traced}")
        said = run(python, "-m", "online_softmax", "--version", cwd=elsewhere)
    print(f"{sdist.name} and {wheel.name} in {folder}, {len(names)} files: {said.strip()} works")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
