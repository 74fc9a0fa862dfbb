"""jit_cache: one kernel under many processes, damaged entries, and no folder to write to."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import warnings
from pathlib import Path

import pytest

import jit_kit
from jit_kit import FACTOR, run
from online_softmax import jit, jit_cache, jit_compile
from online_softmax.jit_cache import Image, Resources

cu_file, fresh_cache, nvrtc = jit_kit.cu_file, jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
SCALE = "scale<float>"
IMAGE = Image(b"code" * 100, "_Z1kv", "sm_80", Resources(8, 0, 0, 0, 128), "said")


def entries() -> list[Path]:
    return sorted((jit.cache_dir() / "cubin").glob("*"))


def test_a_second_process_reads_what_the_first_compiled(cu_file: str, monkeypatch):
    image = jit.compile(cu_file, SCALE, "sm_90a")
    assert jit.compile(cu_file, SCALE, "sm_90a") is image
    count, size_bytes = jit.cache_stats()
    assert (count, size_bytes) == (1, entries()[0].stat().st_size)
    monkeypatch.setattr(jit_compile, "_build", None)
    jit_compile.forget_images()
    assert jit.compile(cu_file, SCALE, "sm_90a") == image
    assert jit.clear_cache() == 1
    assert jit.cache_stats() == (0, 0)


def damage(data: bytes, how: str) -> bytes:
    places = {"magic": 3, "checksum": 40, "header": 80, "code": len(data) // 2, "last": -1}
    if how in places:
        data = bytearray(data)
        data[places[how]] ^= 0x40
        return bytes(data)
    return data[: {"empty": 0, "one byte": 1, "half": len(data) // 2, "short": -1}[how]]


@pytest.mark.parametrize(
    "how", ["empty", "one byte", "half", "short", "magic", "checksum", "header", "code", "last"]
)
def test_a_damaged_entry_heals_with_one_warning(cu_file: str, how: str):
    image = jit.compile(cu_file, SCALE, "sm_80")
    (entry,) = entries()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole, how))
    jit_compile.forget_images()
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        again = jit.compile(cu_file, SCALE, "sm_80")
    assert len(caught) == 1
    assert again.entry == image.entry
    assert entries() == [entry]
    jit_compile.forget_images()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.compile(cu_file, SCALE, "sm_80") == again


def test_an_entry_under_another_name_is_not_believed(fresh_cache: Path):
    jit_cache.write("a" * 64, IMAGE)
    (fresh_cache / "cubin" / f"{'a' * 64}.bin").rename(fresh_cache / "cubin" / f"{'b' * 64}.bin")
    assert jit_cache.read("b" * 64) is None


@pytest.mark.parametrize("where", ["below a file", "no home", "refused"])
def test_without_a_folder_to_write_one_warning_and_work_goes_on(
    cu_file: str, tmp_path: Path, monkeypatch, where: str
):
    if where == "below a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    elif where == "no home":
        monkeypatch.delenv("ONLINE_SOFTMAX_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, no such user
    else:

        def refuse(*_args: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="ONLINE_SOFTMAX_CACHE_DIR") as caught:
        images = [jit.compile(cu_file, SCALE, arch) for arch in ("sm_80", "sm_90a", "sm_80")]
    assert len(caught) == 1
    assert images[0] is images[2]
    assert jit.cache_stats() == (0, 0)
    assert not Path("relative").exists()
    assert not Path("~").exists()


def test_a_read_only_cache_that_has_the_kernel_is_used_in_silence(cu_file: str, monkeypatch):
    image = jit.compile(cu_file, SCALE, "sm_80")
    jit_compile.forget_images()
    monkeypatch.setattr(jit_cache, "write", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.compile(cu_file, SCALE, "sm_80") == image


def test_where_the_folder_is(monkeypatch, tmp_path: Path):
    nested = tmp_path / "not" / "there" / "yet"
    monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", str(nested))
    jit_cache.write("a" * 64, IMAGE)
    assert jit_cache.read("a" * 64) == IMAGE
    assert nested.is_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", "~/elsewhere")
    assert jit.cache_dir() == tmp_path / "elsewhere"
    monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_dir() == tmp_path / "xdg" / "online_softmax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_dir() == tmp_path / ".cache" / "online_softmax"


def test_the_key_holds_all_that_decides_the_code(cu_file: str, monkeypatch):
    source = Path(cu_file)

    def key(symbol: str = SCALE, target: str = "sm_80") -> str:
        return jit_compile._key(source, symbol, target)

    before = key()
    seen = {before, key(symbol="plain"), key(target="sm_90a")}
    for name, value in [("OPTIONS", ("--std=c++20",)), ("nvrtc_version", lambda: "99.0")]:
        with monkeypatch.context() as patch:
            patch.setattr(jit_compile, name, value)
            seen.add(key())
    with monkeypatch.context() as patch:
        patch.setattr("online_softmax.__version__", "99")
        seen.add(key())
    # An include of an include, a changed one, one that appears, the source itself.
    factor = source.parent / "inc" / "factor.cuh"
    for text in ('#include "deep.cuh"\n' + FACTOR, FACTOR + "// x\n"):
        factor.write_text(text)
        seen.add(key())
    factor.write_text('#include "deep.cuh"\n' + FACTOR)
    (source.parent / "inc" / "deep.cuh").write_text("")
    seen.add(key())
    factor.write_text(FACTOR)
    assert key() == before
    source.write_text(source.read_text() + "\n")
    seen.add(key())
    assert len(seen) == 10


def test_the_same_sources_elsewhere_are_the_same_kernel(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.cu").write_text('#include "two.cuh"\n#include "memory.cuh"\n')
    (tmp_path / "a" / "two.cuh").write_text('#include "one.cu"\n')  # a circle ends
    digest = jit_cache.source_digest(tmp_path / "a" / "one.cu", (jit_compile.CUDA_DIR,))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = jit_cache.source_digest(tmp_path / "b" / "one.cu", (jit_compile.CUDA_DIR,))
    assert moved == digest
    assert jit_cache.source_digest(tmp_path / "b" / "one.cu", ()) != digest  # no memory.cuh


def test_a_changed_include_is_compiled_anew(cu_file: str):
    two = jit.compile(cu_file, SCALE, "sm_80")
    (Path(cu_file).parent / "inc" / "factor.cuh").write_text("constexpr float FACTOR = 3.0f;\n")
    three = jit.compile(cu_file, SCALE, "sm_80")
    assert two.code != three.code
    assert jit.cache_stats()[0] == 2


def test_a_file_changed_during_the_compile_is_not_stored(cu_file: str, monkeypatch):
    build = jit_compile._build

    def slow_build(source: Path, symbol: str, target: str) -> Image:
        (source.parent / "inc" / "factor.cuh").write_text("constexpr float FACTOR = 3.0f;\n")
        return build(source, symbol, target)

    monkeypatch.setattr(jit_compile, "_build", slow_build)
    jit.compile(cu_file, SCALE, "sm_80")
    assert jit.cache_stats()[0] == 0


def test_sixteen_processes_at_once_on_an_empty_cache(cu_file: str):
    """Each sees whole entries only: all agree on the code, nobody is warned, nothing is left."""
    said = run(
        "import hashlib, os, sys\n"
        "from online_softmax import jit\n"
        f"jobs = [({cu_file!r}, symbol, 'sm_90a') for symbol in ('scale<float>', 'plain')]\n"
        "ready, go = os.pipe()\n"
        "children = []\n"
        "for _ in range(16):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.close(go); os.read(ready, 1)\n"  # all start when the pipe closes
        "        codes = b''.join(jit.compile(*job).code for job in jobs)\n"
        "        os.write(1, hashlib.sha256(codes).hexdigest().encode() + b'\\n')\n"
        "        os._exit(0)\n"
        "    children.append(child)\n"
        "os.close(go)\n"
        "sys.exit(any(os.waitpid(child, 0)[1] for child in children))\n"
    )
    assert len(said.split()) == 16
    assert len(set(said.split())) == 1
    assert [path.suffix for path in entries()] == [".bin", ".bin"]
    jit_compile.forget_images()
    codes = b"".join(jit.compile(cu_file, s, "sm_90a").code for s in ("scale<float>", "plain"))
    assert hashlib.sha256(codes).hexdigest() in said


@pytest.mark.usefixtures("fresh_cache")
def test_two_containers_with_one_process_id_do_not_meet(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(socket, "gethostname", lambda: "container")
    images = [Image(bytes([i]) * 50_000, f"entry{i}", "sm_80", None, "") for i in range(4)]
    seen = []

    def write_and_read(image: Image) -> None:
        for _ in range(25):
            jit_cache.write("a" * 64, image)
            seen.append(jit_cache.read("a" * 64))

    threads = [threading.Thread(target=write_and_read, args=(image,)) for image in images]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 100
    assert all(image in images for image in seen)
    assert [path.suffix for path in entries()] == [".bin"]


def test_threads_compile_one_kernel_once(cu_file: str, monkeypatch):
    build, built = jit_compile._build, []

    def count(*job: object) -> Image:
        built.append(job)
        return build(*job)

    monkeypatch.setattr(jit_compile, "_build", count)
    job = (cu_file, SCALE, "sm_86")
    threads = [threading.Thread(target=jit.compile, args=job) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_the_folder_stays_small_and_the_dead_are_cleared(fresh_cache: Path, monkeypatch):
    size_bytes = 0
    for i in range(8):
        if i == 7:
            left = fresh_cache / "cubin" / "host-7-x.tmp"
            left.write_bytes(b"half")
            os.utime(left, (0, 0))
            monkeypatch.setattr(jit_cache, "LIMIT_BYTES", size_bytes * 4)
        jit_cache.write(f"{i:064}", IMAGE)
        path = fresh_cache / "cubin" / f"{i:064}.bin"
        size_bytes = path.stat().st_size
        if i < 7:
            os.utime(path, (i + 1, i + 1))
    assert [int(path.stem) for path in entries()] == [5, 6, 7]  # three quarters of the limit
