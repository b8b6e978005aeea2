"""The packed file: made once, mapped after that, replaced when it is not what it should be."""

import fcntl
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from services.worker.native.packed_file import DamagedFileError, candidate_paths, open_or_pack, read_packed
from services.worker.native.packing import pack_tensors
from services.worker.native.recipe import make_recipe
from services.worker.weights import open_checkpoint
from services.worker.weights.tensors import stream_tensors
from tests.unit.worker.native_models import write_model
from treadle_kernels.cpu import PackedLinear, aligned_bytes, unpack_rows


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(write_model(tmp_path, type_name="Q4_0"))


@pytest.fixture
def recipe(checkpoint):
    return make_recipe(checkpoint, "bfloat16", "none")


class CountingPacker:
    """Fills with a pattern, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, out) -> None:
        self.num_calls += 1
        out[:] = np.arange(len(out), dtype=np.uint32).astype(np.uint8)


def is_mapped(data) -> bool:
    base = data
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def test_first_start_packs_and_later_ones_map_the_same_bytes(tmp_path, recipe):
    paths, pack = (tmp_path / "model.packed",), CountingPacker()
    first, second = open_or_pack(paths, recipe, pack), open_or_pack(paths, recipe, pack)
    assert pack.num_calls == 1
    assert is_mapped(first)
    assert is_mapped(second)
    assert not second.flags.writeable
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    assert np.array_equal(first, second)


def test_file_that_another_worker_made_is_taken_wherever_it_is(tmp_path, recipe):
    paths, pack = (tmp_path / "a" / "m.packed", tmp_path / "b" / "m.packed"), CountingPacker()
    open_or_pack(paths[1:], recipe, pack)
    open_or_pack(paths, recipe, pack)
    assert pack.num_calls == 1
    assert not paths[0].exists()


def damage_tensor(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def damage_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[80] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_tensor, "norm.weight is damaged|lm_head.weight is damaged"),
        (damage_header, "its header is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it has .* bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:50]), "it ends inside its header"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), "it is of another format"),
    ],
)
def test_damaged_file_is_found_out_and_replaced(tmp_path, recipe, damage, reason):
    path, pack = tmp_path / "model.packed", CountingPacker()
    expected = open_or_pack((path,), recipe, pack).copy()
    damage(path)
    with pytest.raises(DamagedFileError, match=reason):
        read_packed(path, recipe)
    assert np.array_equal(open_or_pack((path,), recipe, pack), expected)
    assert pack.num_calls == 2
    read_packed(path, recipe)


def test_map_stays_whole_when_another_process_replaces_the_file(tmp_path, recipe):
    path = tmp_path / "model.packed"
    mapped = open_or_pack((path,), recipe, CountingPacker())
    expected = mapped.copy()
    path.unlink()
    open_or_pack((path,), recipe, lambda out: out.fill(7))
    assert np.array_equal(mapped, expected)


def test_next_place_is_taken_where_the_first_cannot_be_written(tmp_path, recipe):
    (tmp_path / "file").write_text("in the way")
    paths = (tmp_path / "file" / "m.packed", tmp_path / "cache" / "m.packed")
    assert is_mapped(open_or_pack(paths, recipe, CountingPacker()))
    assert paths[1].exists()


def test_weights_are_kept_in_memory_where_no_place_can_be_written(tmp_path, recipe):
    (tmp_path / "file").write_text("in the way")
    data = open_or_pack((tmp_path / "file" / "m.packed",), recipe, CountingPacker())
    assert not is_mapped(data)
    assert len(data) == recipe.num_bytes
    assert data.ctypes.data % 64 == 0


def test_failed_packing_leaves_nothing_behind(tmp_path, recipe):
    with pytest.raises(ZeroDivisionError):
        open_or_pack((tmp_path / "new" / "m.packed",), recipe, lambda _: 1 / 0)
    assert list((tmp_path / "new").iterdir()) == []


def test_what_an_ended_process_left_behind_goes_and_what_a_running_one_writes_stays(tmp_path, recipe):
    abandoned, written = tmp_path / ".packing-old", tmp_path / ".packing-now"
    abandoned.write_bytes(b"half")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        open_or_pack((tmp_path / "m.packed",), recipe, CountingPacker())
        assert not abandoned.exists()
        assert written.exists()
    open_or_pack((tmp_path / "n.packed",), recipe, CountingPacker())
    assert not written.exists()


def test_two_that_pack_at_once_both_get_a_whole_file(tmp_path, recipe):
    path, inner = (tmp_path / "m.packed",), CountingPacker()

    def pack(out):
        open_or_pack(path, recipe, inner)
        inner(out)

    assert np.array_equal(open_or_pack(path, recipe, pack), read_packed(path[0], recipe))
    assert inner.num_calls == 2
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_full_disk_is_noticed_before_anything_is_mapped(tmp_path, recipe, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not is_mapped(open_or_pack((tmp_path / "new" / "m.packed",), recipe, CountingPacker()))
    assert list((tmp_path / "new").iterdir()) == []


def test_file_of_older_weights_or_layout_is_removed_and_other_variants_are_kept(tmp_path, recipe):
    old, other = tmp_path / "m.stored.0123456789abcdef.packed", tmp_path / "m.int8.0123456789abcdef.packed"
    old.write_text("old")
    other.write_text("other")
    open_or_pack((tmp_path / f"m.stored.{recipe.fingerprint}.packed",), recipe, CountingPacker())
    assert not old.exists()
    assert other.exists()


def test_places_are_beside_the_model_and_in_the_users_cache(tmp_path, recipe):
    (tmp_path / "Tiny-0.1B").mkdir()
    name = f"stored.{recipe.fingerprint}.packed"
    cache = {"HOME": "/home/me"}
    assert candidate_paths(tmp_path / "Tiny-0.1B", recipe, cache) == (
        tmp_path / "Tiny-0.1B" / f"Tiny-0.1B.{name}",
        Path("/home/me/.cache/treadle/packed") / f"Tiny-0.1B.{name}",
    )
    beside, in_cache = candidate_paths(tmp_path / "Tiny.Q4_0.gguf", recipe, cache | {"XDG_CACHE_HOME": "/x"})
    assert (beside, in_cache) == (tmp_path / f"Tiny.Q4_0.{name}", Path("/x/treadle/packed") / f"Tiny.Q4_0.{name}")
    assert candidate_paths(tmp_path, recipe, {"TREADLE_CACHE_DIR": "/c"})[1].parent == Path("/c/packed")


def test_fingerprint_changes_with_weights_and_with_what_is_done_to_them(tmp_path):
    plain = open_checkpoint(write_model(tmp_path / "a"))
    other = open_checkpoint(write_model(tmp_path / "b", num_layers=1))
    recipes = [
        make_recipe(plain, "bfloat16", "none"),
        make_recipe(plain, "float32", "none"),
        make_recipe(plain, "bfloat16", "int8"),
        make_recipe(plain, "bfloat16", "int4"),
        make_recipe(other, "bfloat16", "none"),
    ]
    assert len({recipe.fingerprint for recipe in recipes}) == 5
    assert make_recipe(plain, "bfloat16", "none") == recipes[0]


def test_rotated_layers_are_another_file_that_leaves_the_first_in_place(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path, type_name="Q4_1"))
    stored, rotated = (make_recipe(checkpoint, "bfloat16", "none", is_rotated=choice) for choice in (False, True))
    paths = [candidate_paths(checkpoint.path, recipe, {})[:1] for recipe in (stored, rotated)]
    for recipe, path in zip((stored, rotated), paths, strict=True):
        open_or_pack(path, recipe, CountingPacker())
    assert all(path.exists() for (path,) in paths)
    assert stored.fingerprint != rotated.fingerprint


def test_rotated_layers_of_other_quantisations_have_names_of_their_own(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path))
    recipes = [make_recipe(checkpoint, "bfloat16", name, is_rotated=True) for name in ("none", "int8", "int4")]
    assert [recipe.variant for recipe in recipes] == ["rotated", "rotated-int8", "rotated-int4"]
    assert len({recipe.fingerprint for recipe in recipes}) == 3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_tensors_hold_exactly_the_numbers_of_the_file_in_our_row_order(tmp_path, family, type_name, dtype):
    import torch

    checkpoint = open_checkpoint(write_model(tmp_path, family, type_name=type_name))
    recipe = make_recipe(checkpoint, dtype, "none")
    packed = open_or_pack((tmp_path / "m.packed",), recipe, lambda out: pack_tensors(recipe, out))
    expected = dict(stream_tensors(checkpoint, torch.float32))
    for tensor in recipe.tensors:
        data = packed[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
        if tensor.weight_format is None:
            found = data.view(np.float32)
        else:
            n, k = tensor.stored.shape
            linear = PackedLinear(data, tensor.weight_format, n, k)
            found = unpack_rows(linear, np.arange(n, dtype=np.int32))
        assert np.array_equal(found, expected.pop(tensor.name).numpy()), tensor.name
    assert expected == {}


def test_progress_rises_to_the_total(checkpoint, recipe):
    calls = []
    pack_tensors(recipe, np.zeros(recipe.num_bytes, dtype=np.uint8), lambda done, total: calls.append((done, total)))
    total = sum(stored.num_bytes for stored in checkpoint.stored_tensors.values())
    assert calls == sorted(calls)
    assert (calls[0], calls[-1]) == ((0, total), (total, total))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs Linux built with CONFIG_TRANSPARENT_HUGEPAGE; other systems take pages as they come",
)
def test_weights_are_wished_for_in_huge_pages(tmp_path, recipe):
    paths = (tmp_path / "model.packed",)
    for data in (open_or_pack(paths, recipe, CountingPacker()), open_or_pack(paths, recipe, CountingPacker())):
        assert "hg" in flags_of_map(data.ctypes.data)
    large = aligned_bytes(3 << 20)
    assert "hg" in flags_of_map(large.ctypes.data)
    assert not large.any()
    assert "hg" not in flags_of_map(aligned_bytes(3 << 10).ctypes.data)


def flags_of_map(address: int) -> list[str]:
    """What the system knows of the map that holds an address."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if is_map := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_found = int(is_map[1], 16) <= address < int(is_map[2], 16)
        if is_found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no map holds the address")
